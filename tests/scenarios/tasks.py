"""Programs as users write them; and at the end SCENARIOS: a program, what strikes it, its guard, what it comes to."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from guarded import cross_entropy, mse
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from resilient_train.data.trees import weights_sha256
from resilient_train.ground.reader import MemoryConfig
from resilient_train.loop.guard import Guard

NEVER = 10**9


class Task(NamedTuple):
    """A program, which is made again for each run."""

    data: Callable[[], Any]
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Any], Any] = partial(torch.optim.AdamW, lr=3e-3)
    steps: int = 250
    batch_size: int = 16
    clip: float | None = 1.0


class Ends(NamedTuple):
    """What a run comes to; None: whatever it is."""

    causes: str | None = ""  # of its incidents
    remedies: str | None = None
    signals: str | None = None
    outcomes: str = "recovered recurred"  # no others
    rows: frozenset[int] | None = None  # that are accused
    op: str | None = None  # of a line that is accused
    says: str = ""  # in the evidence and the advice of the first incident
    verdict: str | None = None
    exit_code: int = 0
    kind: str | None = None  # of the checkpoint at its last step
    loss: float | None = None  # times that of the twin, over all healthy rows, at most; 0: the very weights of the twin
    first: float | None = None  # times the loss that it began with
    rewinds: int | None = None  # at most
    is_accepted: bool = False  # each incident, as a change on purpose
    breaks: bool = False  # in a plain loop; here its rate is not to blame
    is_touched: bool = True  # else no samples were skipped, and no knob is turned at the end


class Scenario(NamedTuple):
    task: Task
    ends: Ends
    spoil: Callable[[Any, Any, Any, Tensor], Tensor] | None = None  # of the run, the model, a batch and its loss
    after: Callable[[Any], object] | None = None  # what the loop does behind each update
    rate: Callable[[int], float] | None = None  # a schedule: what the configured rate is multiplied by
    hands_over: bool = False  # the loop makes forward and backward itself
    twin: Task | None = None  # the program without the fault, if that is in the data
    guard: dict[str, Any] | None = None  # more options


class Running:
    """One run of a scenario."""

    def __init__(self, row: Scenario, run_dir: Path | None = None) -> None:
        torch.manual_seed(0)
        self.row, self.count = row, 0
        self.model: Any = row.task.model()
        self.optimizer = row.task.optimizer(self.model.parameters())
        given = {
            "batch_size": row.task.batch_size,
            "clip": row.task.clip,
            "steps": row.task.steps,
            "run_dir": run_dir,
            "objective": None if row.hands_over else self.loss,
            "schedule": None if row.rate is None else LambdaLR(self.optimizer, row.rate),
            **(row.guard or {}),
        }
        self.guard = Guard(None, self.model, self.optimizer, data=row.task.data(), **given)

    @property
    def step(self) -> int:
        return self.guard.attempted_step + 1

    def loss(self, model: Any, batch: Any) -> Tensor:
        loss = self.row.task.loss(model, batch)
        return (
            loss if self.row.spoil is None or not hasattr(self, "guard") else self.row.spoil(self, model, batch, loss)
        )

    def train(self) -> Running:
        self.loop()
        self.guard.close()
        return self

    def loop(self, steps: int | None = None) -> None:
        for batch in self.guard.batches(steps):
            self.count += 1  # of the loop, which does not go back
            if self.row.hands_over:
                self.guard.world.accelerator.backward(loss := self.loss(self.model, batch))
                self.guard.update(loss)
            else:
                self.guard.step(batch)
            if self.row.after is not None:
                with torch.no_grad():
                    self.row.after(self)

    @torch.no_grad()
    def final_loss(self) -> float:
        """Over all rows, as they should be, in evaluation mode."""
        batch = [torch.stack(column) for column in zip(*((self.row.twin or self.row.task).data()), strict=True)]
        self.model.eval()
        return float(self.row.task.loss(self.model, batch))


def plain_loss(task: Task) -> float:
    """What a loop without a guard comes to in ten epochs."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    for batch in [batch for _ in range(10) for batch in DataLoader(task.data(), task.batch_size)]:
        optimizer.zero_grad()
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return float(task.loss(model, task.data().tensors).detach())


@cache
def twin(task: Task, hands_over: bool, steps: int) -> tuple[str, float]:
    """The weights and the loss of a run in which nothing strikes."""
    run = Running(Scenario(task._replace(steps=steps), Ends(), hands_over=hands_over)).train()
    assert run.guard.incidents == []
    return weights_sha256(run.guard.state), run.final_loss()


# ---------------------------------------------------------------------------------------------- points around centers

BLOBS, WIDTH, CLASSES = 768, 12, 4


def blobs() -> TensorDataset:
    """Points around four centers, and to which of them each belongs."""
    numbers = torch.Generator().manual_seed(3)
    labels = torch.randint(CLASSES, (BLOBS,), generator=numbers)
    centers = 1.2 * torch.randn(CLASSES, WIDTH, generator=numbers)
    points = centers[labels] + torch.randn(BLOBS, WIDTH, generator=numbers)
    return TensorDataset(points, labels)


class Classifier(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 32), nn.BatchNorm1d(32) if norm else nn.Identity()
        self.last = nn.Linear(32, CLASSES)

    def forward(self, points: Tensor) -> Any:
        return self.last(torch.relu(self.norm(self.first(points))))


CLASSIFY = Task(blobs, Classifier, cross_entropy)
NORMED = CLASSIFY._replace(model=partial(Classifier, True))
FAR = frozenset(torch.randperm(BLOBS, generator=torch.Generator().manual_seed(8))[:23].tolist())


def far_out() -> TensorDataset:
    """Three rows in a hundred, a thousand times too large."""
    points, labels = blobs().tensors
    points[[*FAR]] *= 1000
    return TensorDataset(points, labels)


def stretch(times: float, start: int, steps: int) -> Callable[[int], float]:
    return lambda step: times if start <= step < start + steps else 1.0


def raised(by: Callable[[int], float]) -> Callable[..., Tensor]:
    """A loss that is higher from some attempted update on, whatever is learned."""
    return lambda run, model, batch, loss: loss + 1 + by(run.guard.clock.tick)


def nan_from(tick: int) -> Callable[..., Tensor]:
    return lambda run, model, batch, loss: loss * (math.nan if run.guard.clock.tick >= tick else 1)


def shuffled_from(tick: int) -> Callable[..., Tensor]:
    """Labels that mean nothing from some attempted update on, and more and more weight on them."""
    numbers = torch.Generator().manual_seed(5)

    def spoil(run: Running, model: Any, batch: Any, loss: Tensor) -> Tensor:
        points, labels = batch
        odd = (labels + torch.randint(1, CLASSES, labels.shape, generator=numbers)) % CLASSES
        if run.guard.clock.tick < tick or not model.training:
            return loss
        return (1 + 0.3 * (run.guard.clock.tick - tick)) * F.cross_entropy(model(points), odd)

    return spoil


def at(step: int, change: Callable[[Running], object]) -> Callable[[Running], object]:
    """What somebody writes into the state behind an attempted update."""
    return lambda run: change(run) if run.guard.clock.tick == step else None


def lose_moments(run: Running) -> None:
    for state in run.optimizer.state.values():
        state["exp_avg_sq"].zero_()


def spoil_statistics(size: float) -> Callable[[Running], object]:
    return lambda run: [one.fill_(size) for one in (run.model.norm.running_mean, run.model.norm.running_var)]


def weighed(model: Any, batch: Any) -> Tensor:
    """Rows with a field that their losses are multiplied by."""
    losses: Tensor = batch[2] * F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses.mean()


def with_weights(rows: tuple[int, ...] = ()) -> TensorDataset:
    weights = torch.ones(BLOBS).index_fill(0, torch.tensor(rows, dtype=torch.long), 1e6)
    return TensorDataset(*blobs().tensors, weights)


WEIGHED = CLASSIFY._replace(data=with_weights, loss=weighed)
EARLY = (35, 645)  # rows of the third update, and of the forty-first


# ------------------------------------------------------------------------------------------- a regression that changes

CHANGE = 160


def sines(seed: int = 0, size: int = 512) -> TensorDataset:
    made = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 8, generator=made)
    targets = torch.tanh(inputs @ torch.randn(8, 3, generator=made))
    return TensorDataset(inputs, targets + 0.1 * torch.randn(size, 3, generator=made))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))


FIT = Task(sines, layers, mse, partial(torch.optim.AdamW, lr=5e-3), steps=260, clip=None)


def with_penalty(run: Running, model: Any, batch: Any, loss: Tensor) -> Tensor:
    """An auxiliary loss is switched on."""
    return loss + F.mse_loss(model(batch[0]).roll(1, 1), batch[1]) if run.step >= CHANGE else loss


def by_count(run: Running, model: Any, batch: Any, loss: Tensor) -> Tensor:
    return loss + F.mse_loss(model(batch[0]).roll(1, 1), batch[1]) if run.count >= CHANGE else loss


def other_loss(run: Running, model: Any, batch: Any, loss: Tensor) -> Tensor:
    return 30 * F.l1_loss(model(batch[0]), batch[1]) if run.step >= CHANGE else loss


def rotting(run: Running, model: Any, batch: Any, loss: Tensor) -> Tensor:
    is_wrong = torch.rand(len(batch[0]), 1) < (run.step - 100) / 300
    return F.mse_loss(model(batch[0]), torch.where(is_wrong, 3 * batch[1].roll(1, 0), batch[1]))


def draw_again(run: Running) -> None:
    """The loop replaces a head at certain steps, and again after a rewind."""
    step = run.guard.attempted_step
    if step and step % 100 == 0:
        torch.manual_seed(step)
        run.model[2].reset_parameters()


@cache
def good_weights() -> dict[str, Tensor]:
    with torch.enable_grad():
        good: dict[str, Tensor] = Running(Scenario(FIT._replace(batch_size=64), Ends())).train().model.state_dict()
        return good


def load(sign: int) -> Callable[[Running], object]:
    """Weights that are trained are loaded once, or damage of the same size."""
    return at(103, lambda run: run.model.load_state_dict({name: sign * one for name, one in good_weights().items()}))


slow = FIT._replace(optimizer=partial(torch.optim.AdamW, lr=1e-4))


# ------------------------------------------------------------------------- runs that explode with their first updates


def curves(times: float = 1.0) -> TensorDataset:
    points = torch.rand(640, 6, generator=torch.Generator().manual_seed(5))
    return TensorDataset(points, times * (points.sum(1, keepdim=True) - 3))


def stack(kind: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 48), kind(), nn.Linear(48, 48), kind(), nn.Linear(48, 1))


def large_weights() -> nn.Module:
    """Deep, and with first weights that are far too large."""
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), *[m for _ in range(4) for m in (nn.Linear(32, 32), nn.ReLU())])
    net.append(nn.Linear(32, 1))
    numbers = torch.Generator().manual_seed(5)
    for weight in net.parameters():
        nn.init.normal_(weight, 0.0, 0.8, generator=numbers)
    return net


def summed(model: Any, batch: Any) -> Tensor:
    """The loss is a sum where a mean was meant."""
    return 50 * F.mse_loss(model(batch[0]), batch[1], reduction="sum")


EXPLODES = Task(curves, large_weights, mse, partial(torch.optim.SGD, lr=0.05, momentum=0.9), 200, 32, None)
IN_ANOTHER_UNIT = EXPLODES._replace(data=partial(curves, 50.0), model=partial(stack, nn.Tanh))
SUMMED = EXPLODES._replace(model=partial(stack, nn.ReLU), loss=summed)


# ------------------------------------------------------------------------------- readings of sensors, and what raises

BAD = (3, 171)


def readings(bad: tuple[int, ...] = ()) -> TensorDataset:
    """Readings of five sensors by number; `bad` rows name a sensor that there is not."""
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(256, 4, generator=numbers)
    sensors = torch.randint(0, 5, (256,), generator=numbers)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 0.3 * sensors
    sensors[list(bad)] = 7
    return TensorDataset(x, sensors, y)


class Readings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers = nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.offsets = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor, sensors: Tensor) -> Tensor:
        out: Tensor = self.layers(self.norm(x))[:, 0] + self.offsets.gather(0, sensors)
        return out


def squared(model: Any, batch: Any) -> Tensor:
    x, sensors, y = batch
    return F.mse_loss(model(x, sensors), y)


READ = Task(readings, Readings, squared, partial(torch.optim.AdamW, lr=1e-2), steps=60, clip=None)


def with_zeros(*rows: int) -> Callable[[], TensorDataset]:
    def made() -> TensorDataset:
        data = readings()
        data.tensors[0][list(rows), 3] = 0.0
        return data

    return made


def sizes(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(*batch[:2]), batch[2] + batch[0][:, 3].abs().log())


def scaled_sizes(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(*batch[:2]), batch[2] + (batch[0][:, 3].abs() * model.offsets.detach()[0].exp()).log())


def of_a_few(model: Any, batch: Any) -> Tensor:
    """A loss that needs some rows of a kind, of which a batch may have none."""
    chosen = batch[0][batch[0][:, 0] > 0.7]
    if len(chosen) < 2:
        raise ValueError("too few of them")
    return squared(model, batch) + 0.1 * chosen.square().mean()  # type: ignore[no-any-return]


def streamed() -> Any:
    data = readings((40, 171))
    data.tensors[0][200, 3] = 0.0
    return cycle(DataLoader(data, batch_size=16))


def of_streamed(model: Any, batch: Any) -> Tensor:
    sizes: Tensor = batch[0][:, 3].abs().log()
    return squared(model, batch) + sizes.mean()


UNREACHABLE: dict[str, Any] = {"functional": F}
code = "def objective(model, batch):\n    return functional.mse_loss(model(batch[0].log()), batch[1])"
exec(code, UNREACHABLE)  # there is no file of it
NO_VOLUME = (7, 33, 100, 150, 201, 240)


def volumes() -> TensorDataset:
    x = torch.rand(256, 4, generator=torch.Generator().manual_seed(1)) + 0.1
    y = x.log().sum(1, keepdim=True)
    x[list(NO_VOLUME), 1] = 0.0
    return TensorDataset(x, y)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


VOLUMES = READ._replace(data=volumes, model=small, loss=UNREACHABLE["objective"], steps=64)


def raises_once(number: int) -> Callable[..., Tensor]:
    calls = [0]

    def spoil(run: Running, model: Any, batch: Any, loss: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == number:
            raise OSError("a socket that was closed")
        return loss

    return spoil


# ------------------------------------------------------------------------- state that a forward writes besides weights


class Centres(nn.Module):
    """Pulls embeddings to the centres of their classes, which now and then become the means of a batch.

    A class without a row in it has the mean of nothing: 0 / 0, which the loss meets in the next forward.
    """

    centres: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 5), nn.Linear(5, CLASSES)
        self.register_buffer("centres", torch.zeros(CLASSES, 5))
        self.how, self.calls = how, 0

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        embedded = self.embed(rows)
        loss: Tensor = F.cross_entropy(self.head(embedded), labels)
        loss = loss + 0.1 * (embedded - self.centres[labels]).square().mean()
        self.calls += self.training
        if self.training and self.calls % 5 == 0:
            of = F.one_hot(labels, CLASSES).float()
            sums, counts = of.T @ embedded.detach(), of.sum(0).unsqueeze(1)
            if self.how == "in place":  # a line of its own for each test: a patch lasts as long as the process
                self.centres.copy_(sums / counts)
            else:
                self.centres = sums.div(counts)
        return loss


def classes() -> list[tuple[Tensor, int]]:
    """Every class is frequent but the last."""
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(6, generator=made), 3 if number % 40 == 0 else number % 3) for number in range(512)]


def centred(how: str) -> Task:
    optimizer = partial(torch.optim.Adam, lr=0.01)
    return Task(classes, partial(Centres, how), lambda model, batch: model(*batch), optimizer, 200, 32, None)


class Carries(nn.Module):
    """A recurrent model keeps its last state; one NaN in it would be in every update from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 1)
        self.state = torch.zeros(8, 8)

    def forward(self, rows: Tensor) -> Tensor:
        state = self.cell(rows, self.state)
        self.state = state.detach()
        loss: Tensor = self.head(state).square().mean()
        return loss


def with_a_nan() -> list[Tensor]:
    rows = [torch.randn(6, generator=torch.Generator().manual_seed(seed)) for seed in range(64)]
    rows[37][2] = torch.nan
    return rows


CARRIED = Task(with_a_nan, Carries, lambda model, batch: model(batch), partial(torch.optim.SGD, lr=0.01), 40, 8, None)


# ------------------------------------------------------------------------------------------------------- the scenarios

no_room = {"memory": MemoryConfig(every=25, keep=4, max_gib=1e-6), "disk": 25}


def unproven(recovery: str, exit_code: int, kind: str | None, verdict: str) -> Scenario:
    """The last remedy cannot show what it does before the planned end, and no state can be restored."""
    ends = Ends(None, outcomes="gave_up unrecovered recurred", verdict=verdict, exit_code=exit_code, kind=kind)
    guard = {**no_room, "recovery": recovery}
    return Scenario(CLASSIFY._replace(steps=165), ends, shuffled_from(150), guard=guard)


on_purpose = Ends(None, outcomes="recovered recurred", verdict="well", is_touched=False, rewinds=1, says="expect=[160]")
limited = Ends(None, outcomes="recovered recurred unrecovered", first=0.1, breaks=True)

SCENARIOS: dict[str, Scenario] = {
    # A rate that leaps: the same samples at the rate of before. One that has risen for good is limited for good.
    "a hot stretch": Scenario(
        CLASSIFY._replace(steps=170),
        Ends("rate", says="jumped x100 from step 100 to 101: look at the", loss=0),
        rate=stretch(100, 100, 10),
    ),
    "a rate that is hot from a step on": Scenario(
        CLASSIFY._replace(steps=220),
        Ends("rate", says="jumped x200 from step 120 to 121: look at the", loss=0),
        rate=stretch(200, 120, NEVER),
    ),
    "a hot stretch that is only observed": Scenario(
        CLASSIFY._replace(steps=170),
        Ends(None, outcomes="observed", verdict="observed", is_touched=False, rewinds=0),
        rate=stretch(1000, 100, 30),
        guard={"recovery": "observe"},
    ),
    # What does not return: the run ends on the best state that was proven, however much came after.
    "labels that mean nothing": Scenario(
        CLASSIFY._replace(steps=400),
        Ends(None, outcomes="gave_up unrecovered recurred", exit_code=3, loss=0),
        shuffled_from(150),
        hands_over=True,
        guard={"recovery": "conservative"},
    ),
    "losses that are NaN": Scenario(
        CLASSIFY._replace(steps=400),
        Ends(None, outcomes="gave_up unrecovered recurred", exit_code=3, loss=0),
        nan_from(150),
        hands_over=True,
    ),
    "a planned end without a way back": unproven("balanced", 3, None, "gave_up"),
    "a planned end without a way back, skip": unproven("skip", 0, "verified", "unrecovered"),
    # Damage that passes. A policy that only reports waits for it.
    "a loss that jumps where the rate starts again": Scenario(
        CLASSIFY._replace(steps=300),
        Ends(None, outcomes="recovered"),
        raised(lambda tick: (200 <= tick < 212) * 3),
        rate=lambda step: 0.55 + 0.45 * math.cos(math.pi * (step % 200) / 200),
        hands_over=True,
    ),
    "a loss that jumps, skip": Scenario(
        CLASSIFY._replace(steps=300),
        Ends(None, outcomes="recovered"),
        raised(lambda tick: (150 <= tick < 162) * 3),
        hands_over=True,
        guard={"recovery": "skip"},
    ),
    "nothing is learned": Scenario(
        CLASSIFY._replace(steps=120, optimizer=partial(torch.optim.SGD, lr=1e-9)),
        Ends(verdict="no_progress"),
    ),
    # Bad rows.
    "rows far out": Scenario(CLASSIFY._replace(data=far_out), Ends("data", loss=1.15), twin=CLASSIFY),
    "rows far out in the first updates": Scenario(
        WEIGHED._replace(data=partial(with_weights, EARLY)),
        Ends("data", rows=frozenset(EARLY), loss=1.15),
        twin=WEIGHED,
        guard={"shuffle": False},
    ),
    # Damage from outside.
    "a weight that is written every fifty updates": Scenario(
        CLASSIFY._replace(steps=200),
        Ends("corruption", loss=0),
        after=lambda run: run.model.last.weight[1, 2].fill_(500.0) if run.guard.clock.tick % 50 == 40 else None,
    ),
    "lost moments": Scenario(
        CLASSIFY._replace(steps=200), Ends(None, outcomes="recovered", loss=1.15), after=at(100, lose_moments)
    ),
    "running statistics far off": Scenario(
        NORMED._replace(steps=200),
        Ends("corruption", signals="weights_jump", loss=0),
        after=at(130, spoil_statistics(1e6)),
        hands_over=True,
    ),
    # What changes on purpose goes on with the configured rate and all samples; damage of that size is undone.
    "a penalty is switched on": Scenario(FIT, on_purpose._replace(rewinds=0), with_penalty),
    "another loss": Scenario(FIT, on_purpose._replace(rewinds=0), other_loss),
    "a penalty by a counter of the loop": Scenario(FIT, on_purpose, by_count, hands_over=True),
    "another loss that is declared": Scenario(
        FIT, Ends(verdict="well"), other_loss, hands_over=True, guard={"expect": [CHANGE]}
    ),
    "a head that is drawn again and again": Scenario(
        FIT._replace(steps=400), Ends(None, verdict="well", is_touched=False, is_accepted=True), after=draw_again
    ),
    "weights that are loaded once": Scenario(slow, Ends(first=0.4), after=load(1)),
    "damage of the same size": Scenario(slow, Ends(None, loss=1.15), after=load(-1)),
    # Updates are limited where a run explodes for other reasons than its rate, with which it is trained.
    "targets in another unit": Scenario(IN_ANOTHER_UNIT, limited),
    "a loss that is a sum": Scenario(SUMMED, limited),
    "first weights that are too large": Scenario(EXPLODES, limited),
    # What raises, and lines that rows break. A rare row is put away where the line computes of data alone: a value made
    # up there would be made-up data; else the line is patched.
    "rows that raise": Scenario(
        READ._replace(data=partial(readings, BAD)),
        Ends("data", "quarantine", "exception", rows=frozenset(BAD), says="index 7 is out of bounds"),
        guard={"shuffle": False},
    ),
    "a row that breaks a logarithm": Scenario(
        READ._replace(data=with_zeros(40), loss=sizes), Ends("data", "quarantine", rows=frozenset([40]), op="log")
    ),
    "many rows that break a logarithm": Scenario(
        READ._replace(data=with_zeros(*range(0, 256, 10)), loss=sizes),
        Ends("operation", "armor", rows=frozenset(), op="log"),
    ),
    "a row that breaks a line which weights enter": Scenario(
        READ._replace(data=with_zeros(40), loss=scaled_sizes), Ends("operation", "armor", rows=frozenset(), op="log")
    ),
    "batches without enough of something": Scenario(
        READ._replace(loss=of_a_few), Ends("unknown", "skip", rows=frozenset(), op="statement")
    ),
    "an error that does not come again": Scenario(READ, Ends("transient", "repeat", loss=0), raises_once(12)),
    "a stream without an index": Scenario(READ._replace(data=streamed, loss=of_streamed), Ends(None, "skip armor")),
    "a line that has no source": Scenario(VOLUMES, Ends(None, "skip quarantine", rows=frozenset(NO_VOLUME))),
    # State that a forward writes besides the weights. The line is found though the loss meets it in a later update.
    "a buffer that is spoiled in place": Scenario(
        centred("in place"), Ends("corruption operation", op="div", outcomes="recovered")
    ),
    "a state that is carried along": Scenario(CARRIED, Ends("data", rows=frozenset([37]))),
}
