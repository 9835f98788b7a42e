"""Recovered means back where it was: what runs come to, and what they say of it, through the doors that people use."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from guarded import accused, cross_entropy, trained
from kills import incidents, kinds, summary
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from resilient_train.durable.trees import weights_sha256
from resilient_train.ground.errors import GaveUp
from resilient_train.ground.reader import MemoryConfig
from resilient_train.ground.wording import say
from resilient_train.loop.guard import Guard
from resilient_train.report.story import read_story
from resilient_train.report.uploader import note

NEVER = 10**9
BLOBS, WIDTH, CLASSES = 768, 12, 4


def blobs(bad: Callable[[Tensor, Tensor], None] = lambda x, y: None) -> TensorDataset:
    """Points around four centers, and to which of them each belongs; `bad` spoils some."""
    numbers = torch.Generator().manual_seed(3)
    labels = torch.randint(CLASSES, (BLOBS,), generator=numbers)
    centers = 1.2 * torch.randn(CLASSES, WIDTH, generator=numbers)
    points = centers[labels] + torch.randn(BLOBS, WIDTH, generator=numbers)
    bad(points, labels)
    return TensorDataset(points, labels)


class Classifier(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 32), nn.BatchNorm1d(32) if norm else nn.Identity()
        self.last = nn.Linear(32, CLASSES)

    def forward(self, points: Tensor) -> Any:
        return self.last(torch.relu(self.norm(self.first(points))))


class Loop:
    """A program of a user's own, with a learning rate that may leap for a while."""

    def __init__(
        self,
        hot: Callable[[int], float] = lambda step: 1.0,
        data: Any = None,
        norm: bool = False,
        build: Callable[[Any], Any] = lambda weights: torch.optim.AdamW(weights, lr=3e-3),
        hands_over: bool = False,
        objective: Callable[[Any, Any], Tensor] = cross_entropy,
        model: type[Classifier] = Classifier,
        **more: Any,
    ) -> None:
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)  # else it leaps sooner with ranks
        self.model = model(norm)
        optimizer = build(self.model.parameters())
        schedule = LambdaLR(optimizer, hot)
        prepared, self.optimizer, schedule = accelerator.prepare(self.model, optimizer, schedule)
        self.objective, self.hands_over = objective, hands_over
        more = {"data": data or blobs(), "batch_size": 16, "clip": 1.0, **more}
        given = None if hands_over else objective
        self.guard = Guard(accelerator, prepared, self.optimizer, schedule=schedule, objective=given, **more)

    def train(self, steps: int, after: Callable[[int], Any] = lambda tick: None, plan: int | None = NEVER) -> Loop:
        self.guard.steps = steps if plan == NEVER else plan
        for batch in self.guard.batches(steps):
            if self.hands_over:
                loss = self.objective(self.guard.model, batch)
                self.guard.world.accelerator.backward(loss)
                self.guard.update(loss)
            else:
                self.guard.step(batch)
            after(self.guard.clock.tick)
        return self

    @torch.no_grad()
    def loss(self) -> float:
        """Over all rows, as they should be, in evaluation mode."""
        self.model.eval()
        found = cross_entropy(self.model, blobs().tensors).item()
        self.model.train()
        return found

    def told(self) -> list[tuple[str, str, str]]:
        return [
            (str(one.anomaly.signal), str(one.diagnosis.cause), str(one.outcome))
            for one in self.guard.incidents
            if one.diagnosis.cause != "process"
        ]

    def weights(self) -> str:
        return weights_sha256(self.guard.state)


@cache
def healthy(steps: int, hands_over: bool = False, norm: bool = False) -> tuple[str, float]:
    """The weights and the loss of a run in which nothing happens."""
    loop = Loop(hands_over=hands_over, norm=norm).train(steps)
    return loop.weights(), loop.loss()


def stretch(times: float, start: int, steps: int) -> Callable[[int], float]:
    return lambda step: times if start <= step < start + steps else 1.0


# ------------------------------------------------------------------------------------------- a rate that leaps


@pytest.mark.parametrize(
    ("times", "start", "steps", "hands_over"), [(100, 100, 10, False), (1000, 40, 40, True), (200, 120, NEVER, False)]
)
def test_a_hot_stretch_leaves_no_trace(times: float, start: int, steps: int, hands_over: bool) -> None:
    """The same samples at the rate of before: to the last bit the run that has no such stretch; and it is named.

    A rate that has risen for good is limited for good.
    """
    end = start + min(steps, 40) + 60
    hot = Loop(stretch(times, start, steps), hands_over=hands_over).train(end)
    assert hot.weights() == healthy(end, hands_over)[0]
    assert {cause for _, cause, _ in hot.told()} == {"rate"}
    assert {outcome for *_, outcome in hot.told()} <= {"recovered", "recurred"}
    advice = say(hot.guard.incidents[0].diagnosis.advice)
    assert f"jumped x{times:,g} from step {start} to {start + 1}: look at the" in advice
    assert "expect" not in advice
    assert hot.guard.samples.skipped.spans == [], "the samples are innocent"


def test_a_leap_is_told_by_the_rate_before_it_and_its_cap_while_it_acts(
    tmp_path: Path, info: pytest.LogCaptureFixture
) -> None:
    """A schedule that had fallen to 0.4 leapt x500: so say incident, advice, the end of the run and its page, which ask
    for the schedule, and not for a lower rate."""
    hot = Loop(lambda step: (0.4 if step >= 60 else 1.0) * (500 if step >= 120 else 1), run_dir=tmp_path / "run")
    hot.train(220).guard.close()
    advice = "The learning rate jumped x500 from step 120 to 121: look at the schedule, and at what else sets it there"
    (one,) = hot.guard.incidents
    assert say(one.diagnosis.advice).startswith(advice)
    assert say(one.anomaly.evidence).endswith("was usual before the learning rate rose x500")
    said = info.text
    assert "learning rate capped at the configured one and falling with the schedule" in said
    assert "still active at the end: learning rate capped at the configured one" in said
    first, *_ = note(read_story(tmp_path / "run"), str).splitlines()
    assert advice in first
    assert "lower the learning rate" not in first


# ----------------------------------------------------------------------------------------- what does not come back


def shuffled_from(tick: int, loop: list[Loop]) -> Callable[[Any, Any], Tensor]:
    """Labels that mean nothing from some attempted update on, and more and more weight on them."""
    numbers = torch.Generator().manual_seed(5)

    def objective(model: Any, batch: Any) -> Tensor:
        points, labels = batch
        wrong = loop and loop[0].guard.clock.tick >= tick and model.training
        odd = (labels + torch.randint(1, CLASSES, labels.shape, generator=numbers)) % CLASSES
        weight = 1 + 0.3 * (loop[0].guard.clock.tick - tick) if wrong else 1.0
        return weight * F.cross_entropy(model(points), odd if wrong else labels)

    return objective


def poison_from(tick: int, loop: list[Loop]) -> Callable[[Any, Any], Tensor]:
    """Every loss is NaN from some attempted update on."""

    def objective(model: Any, batch: Any) -> Tensor:
        is_poison = loop and loop[0].guard.clock.tick >= tick
        return cross_entropy(model, batch) * (math.nan if is_poison else 1)

    return objective


@pytest.mark.parametrize(
    ("objective", "recovery", "signal"),
    [(shuffled_from, "conservative", "loss_spike"), (poison_from, "balanced", "nonfinite_loss")],
)
def test_a_run_that_does_not_come_back_returns(
    objective: Any, recovery: str, signal: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It soon gives up with code 3, says why, and ends on the best state that was proven, however much came after."""
    made: list[Loop] = []
    made.append(Loop(objective=objective(150, made), hands_over=True, recovery=recovery, run_dir=tmp_path))
    with pytest.raises(GaveUp) as error:
        made[0].train(400)
    guard = made[0].guard
    assert error.value.exit_code == read_story(tmp_path).exit_code == 3
    assert 100 <= guard.clock.step < 150
    assert guard.clock.tick <= 150 + 100
    assert made[0].weights() == healthy(guard.clock.step, True)[0]
    written = summary(tmp_path)
    assert (written["status"], written["exit_code"], written["steps"]) == ("gave_up", 3, guard.clock.step)
    assert written["verdict"] == "gave_up"
    [kept] = (tmp_path / "checkpoints").iterdir()
    assert kept.name == f"step-{guard.clock.step:08}"
    on_disk = load_file(kept / "weights.safetensors")
    assert all(torch.equal(on_disk[name], weight) for name, weight in made[0].model.named_parameters())
    (farewell,) = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    for words in ("gave up at step", signal, "what to try next", str(kept)):
        assert words in farewell
    outcomes = [one["outcome"] for one in incidents(tmp_path)]
    assert outcomes == [outcome for *_, outcome in made[0].told()]
    assert "recovered" not in outcomes
    assert outcomes[-1] == "gave_up"


def raised(made: list[Loop], by: Callable[[int], float]) -> Callable[[Any, Any], Tensor]:
    """A loss that is higher from some attempted update on, whatever is learned."""
    return lambda model, batch: cross_entropy(model, batch) + 1 + (by(made[0].guard.clock.tick) if made else 0)


@pytest.mark.parametrize("is_asked", [False, True])
def test_what_a_chunk_leaves_off_its_reference_is_not_verified(is_asked: bool, tmp_path: Path) -> None:
    """It is a candidate until its loss is back; whoever closes the run returns to the state from before, for good.

    A run that was asked to stop is not over: the next process resumes with what was left, and with the incident.
    """
    made: list[Loop] = []
    more: dict[str, Any] = {"run_dir": tmp_path / "run", "disk": 25, "resume": True}
    objective = raised(made, lambda tick: (tick >= 150) * (3 if tick < 156 else 0.25))
    stop = lambda: is_asked and made[0].guard.clock.tick >= 190  # noqa: E731
    made.append(Loop(objective=objective, hands_over=True, stop=stop, **more))
    guard = made[0].guard
    made[0].train(400 if is_asked else 160, plan=None)
    assert guard.leave() is not None
    saved, left = kinds(tmp_path / "run"), guard.clock.step
    assert saved.pop(left) == "candidate"
    assert max(saved) < 150 < left
    with nullcontext() if is_asked else pytest.raises(GaveUp) as error:
        guard.close()
    assert error is None or str(error.value.last_good).endswith(f"step-{max(saved):08}")
    again, steps = Loop(**more), list[int]()
    again.train(230, lambda tick: steps.append(again.guard.clock.step)).guard.close()
    assert steps[0] == guard.clock.step == (left if is_asked else max(saved))
    assert again.told()[0][2] == ("recovered" if is_asked else "unrecovered")


@pytest.mark.parametrize(
    ("recovery", "exit_code", "kind", "verdict"),
    [
        ("balanced", 3, None, "gave_up"),
        ("skip", 0, "verified", "unrecovered"),
        ("observe", 0, "candidate", "observed"),
        ("off", 3, None, "gave_up"),
    ],
)
def test_a_planned_end_without_a_way_back(
    recovery: str, exit_code: int, kind: str | None, verdict: str, tmp_path: Path, info: pytest.LogCaptureFixture
) -> None:
    """No state can be restored, and the last remedy cannot show what it does: that is no completed run.

    `recovery=skip` never goes back: one alarm, and in the end it never says that it is well.
    """
    made: list[Loop] = []
    small = MemoryConfig(every=25, keep=4, max_gib=1e-6)
    made.append(Loop(objective=shuffled_from(150, made), recovery=recovery, memory=small, run_dir=tmp_path, disk=25))
    with pytest.raises(GaveUp) if exit_code else nullcontext():
        made[0].train(165)
    guard = made[0].guard
    guard.close()
    written = summary(tmp_path)
    assert (written["exit_code"], written["verdict"]) == (exit_code, verdict)
    assert exit_code or len(guard.incidents) == 1
    assert kinds(tmp_path).get(165) == kind
    assert exit_code or guard.clock.step == guard.clock.tick == 165
    assert ("Not recovered, needs attention" in info.text) == (verdict == "unrecovered")


@pytest.mark.parametrize(("more", "policy"), [(math.nan, {"default": []}), (3.0, {"default": [["reset_moments"]]})])
def test_a_run_that_was_just_resumed_ends_on_its_best_checkpoint(more: float, policy: Any, tmp_path: Path) -> None:
    """It gives up, or its plan ends, while nothing in memory is verified: the disk has what was."""
    saving: dict[str, Any] = {"run_dir": tmp_path, "disk": 25, "resume": True}
    first: Loop = Loop(stop=lambda: first.guard.clock.tick >= 70, **saving)
    first.train(200)
    assert first.guard.leave() is not None
    first.guard.close()
    verified = max(step for step, kind in kinds(tmp_path).items() if kind == "verified")
    saving["recovery"] = {"ladders": policy, "strikes": 9}
    loop = Loop(objective=lambda model, batch: cross_entropy(model, batch) + more, **saving)
    with pytest.raises(GaveUp) as error:
        loop.train(80)
    assert str(error.value.last_good).endswith(f"step-{verified:08}")
    assert (loop.guard.clock.step, loop.weights()) == (verified, healthy(verified)[0])


def restarts(step: int) -> float:
    return 0.55 + 0.45 * math.cos(math.pi * (step % 200) / 200)


@pytest.mark.parametrize(("rate", "at", "recovery"), [(restarts, 200, "balanced"), (lambda step: 1.0, 150, "skip")])
def test_damage_that_passes_is_recovered(rate: Callable[[int], float], at: int, recovery: str) -> None:
    """A loss that jumps with a rate that starts again on purpose is undone; a policy that only reports waits for it."""
    made: list[Loop] = []
    objective = raised(made, lambda tick: (at <= tick < at + 12) * 3)
    made.append(Loop(rate, objective=objective, hands_over=True, recovery=recovery))
    assert [one[2] for one in made[0].train(300).told()] == ["recovered"]


def test_a_run_whose_loss_does_not_fall_is_not_well(tmp_path: Path, info: pytest.LogCaptureFixture) -> None:
    """Nothing broke, and nothing was learned: it says so, where it would say that all is well."""
    loop = Loop(build=lambda weights: torch.optim.SGD(weights, lr=1e-9), run_dir=tmp_path / "run").train(120)
    loop.guard.close()
    assert "All is well" not in info.text
    written = summary(tmp_path / "run")
    assert (written["exit_code"], written["verdict"]) == (0, "no_progress")
    assert "The loss did not fall (it began at" in info.text


# -------------------------------------------------------------------------------------------------------- bad rows


def spoiled() -> tuple[set[int], TensorDataset]:
    """Three rows in a hundred, a thousand times too large, and a data set with them."""
    rows = torch.randperm(BLOBS, generator=torch.Generator().manual_seed(8))[:23].tolist()
    points, labels = blobs().tensors
    points[rows] *= 1000
    return set(rows), TensorDataset(points, labels)


def test_bad_rows_are_found_from_the_first_step_on() -> None:
    """These rows are put away, and no other: a ladder is not exhausted by cures that worked."""
    rows, data = spoiled()
    loop = Loop(data=data).train(250)
    found = {*accused(loop.guard.incidents)}
    assert found <= rows
    assert len(found) >= 20
    assert loop.loss() < 1.15 * healthy(250)[1]


def test_a_row_far_out_in_one_of_the_first_updates_is_found() -> None:
    """The gate does not know yet what is usual. A field that is as odd, but that is not read, is no reason."""

    def weighed(model: Any, batch: Any) -> Tensor:
        losses: Tensor = batch[2] * F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return losses.mean()

    def run(rows: set[int], objective: Callable[[Any, Any], Tensor] = weighed) -> Loop:
        weights = torch.ones(BLOBS).index_fill(0, torch.tensor([*rows], dtype=torch.long), 1e6)
        return Loop(data=TensorDataset(*blobs().tensors, weights), objective=objective).train(250)

    clean = run(set())
    assert clean.guard.incidents == []
    rows = {min(clean.guard.samples.rows_at(start, start + 16)) for start in (32, 640)}
    assert run(rows, cross_entropy).guard.incidents == []
    loop = run(rows)
    (incident,) = loop.guard.incidents
    assert (incident.diagnosis.cause, {*incident.diagnosis.rows}, incident.rewound_to) == ("data", rows, 0)
    assert incident.anomaly.evidence[0]["fact"] in ("worse_norms_with_rows", "worse_losses_with_rows")
    assert loop.loss() < 1.15 * clean.loss()


def test_the_first_update_is_no_measure() -> None:
    """It fits the mean of all targets, so its loss is a million times that of later ones, whatever its rows hold."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(()))

    targets = 1000 + torch.randn(BLOBS, generator=torch.Generator().manual_seed(3))

    def run(rows: set[int]) -> Guard:
        unread = torch.ones(BLOBS).index_fill(0, torch.tensor([*rows], dtype=torch.long), 1e6)
        model = Mean()
        guard = Guard(None, model, torch.optim.SGD(model.parameters(), lr=0.5), batch_size=16, clip=None, steps=60,
                      data=TensorDataset(targets, unread),
                      objective=lambda model, batch: (model.mean - batch[0]).square().mean())  # fmt: skip
        return trained(guard)

    clean = run(set())
    assert clean.incidents == run({min(clean.samples.rows_at(0, 16))}).incidents == []


def test_rows_that_a_normalization_hides_are_found() -> None:
    """Behind a batch norm no gradient jumps: the others of the batch are squashed, and nothing is learned from it."""
    rows, data = spoiled()
    loops = [Loop(data=data, norm=True, build=sgd).train(250) for data in (data, blobs())]
    assert [(one.diagnosis.cause, one.outcome) for one in loops[0].guard.incidents] == [("data", "recovered")]
    assert {*accused(loops[0].guard.incidents)} == rows
    assert loops[0].loss() < 1.15 * loops[1].loss()


def sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1)


def test_labels_that_are_wrong_for_a_stretch_are_data() -> None:
    """Their loss is high at weights at which earlier samples have their usual one: no lower rate is advised."""

    numbers = torch.Generator().manual_seed(1)
    order = torch.cat([torch.randperm(BLOBS, generator=numbers) for _ in range(8)])
    points, labels = blobs().tensors
    points, labels = points[order], labels[order].clone()
    labels[2400:2900] = (labels[2400:2900] + 1) % CLASSES
    loop = Loop(data=TensorDataset(points, labels), shuffle=False).train(300)
    assert {cause for _, cause, _ in loop.told()} == {"data"}
    assert loop.guard.incidents[0].diagnosis.advice[0]["fact"] == "bad_labels"
    assert loop.guard._controls.knobs.values.lr == 1.0


# --------------------------------------------------------------------------------------------- damage from outside


def tampered(change: Callable[[Loop], Any], at: range, **more: Any) -> Loop:
    """A run of 200 updates, between some of which somebody writes into its state."""
    loop = Loop(**more)
    return loop.train(200, lambda tick: torch.no_grad()(change)(loop) if tick in at else None)


def test_tampering_again_and_again_goes_on_being_cured() -> None:
    """Every fifty updates somebody writes into a weight: each time it is undone, for as long as it goes on."""
    loop = tampered(lambda loop: loop.model.last.weight[1, 2].fill_(500.0), range(40, 400, 50))
    assert len(loop.told()) >= 4
    assert {cause for _, cause, _ in loop.told()} == {"corruption"}
    assert loop.weights() == healthy(200)[0]


def test_lost_moments_are_got_over() -> None:
    """The run learns what it would have learnt with them."""
    loop = tampered(
        lambda loop: [state["exp_avg_sq"].zero_() for state in loop.optimizer.state.values()], range(100, 101)
    )
    assert {outcome for *_, outcome in loop.told()} == {"recovered"}
    assert loop.loss() < 1.15 * healthy(200)[1]


@pytest.mark.parametrize(("size", "hands_over"), [(1e6, True), (1e30, False)])
def test_running_statistics_are_looked_at(size: float, hands_over: bool) -> None:
    """No training loss tells of them: what evaluation uses is as it would have been."""
    change = lambda loop: [one.fill_(size) for one in (loop.model.norm.running_mean, loop.model.norm.running_var)]  # noqa: E731
    loop = tampered(change, range(130, 131), norm=True, hands_over=hands_over)
    assert [one[:2] for one in loop.told()] == [("weights_jump", "corruption")]
    assert loop.guard.incidents[0].anomaly.evidence[0]["name"] == "norm"
    assert loop.loss() == healthy(200, hands_over, True)[1]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Leave the logging of the process as it was."""
    level = logging.getLogger("resilient_train").level
    yield
    logging.getLogger("resilient_train").setLevel(level)
