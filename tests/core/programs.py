"""Programs, what strikes them, and how they are guarded; and the same programs in a plain loop.

Each is trained with a guard and by a plain loop over the same rows, which leaves out the update that has to be refused.
Both end alike to the last bit: in weights, buffers, moments, average, loss scale, and place in the data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from guarded import SKIP, Net, adamw, cross_entropy, often
from kills import die_with_checkpoint
from pairs import SPOILED, Pair
from torch import Tensor, distributed, nn, optim
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from resilient_train.core.clip import clip
from resilient_train.core.randomness import Seeds
from resilient_train.data.trees import sha256
from resilient_train.loop.guard import Guard

STEPS, BATCH = 40, 8
Spoil = Callable[[Tensor], Tensor]


class Left(Exception):
    """The loop is left, and entered again."""


class Fault(NamedTuple):
    """What strikes once: how, in which update, and in which of its losses; all are counted from 1."""

    how: str  # a key of MEETS
    at: int
    part: int = 1
    rank: int = 0


MEETS = {  # the signals of the incident
    "row": {"nonfinite_batch", "nonfinite_loss"},  # NaN in the data set; a scan of the batch knows it is that
    # A weight is suddenly 1e30.
    "bit": {"loss_spike", "nonfinite_loss", "nonfinite_grad", "weights_jump", "nonfinite_weights"},
    "drift": {"loss_spike", "weights_jump"},  # weights are suddenly others, and every update lands
    "loss": {"nonfinite_loss"},
    "gradient": {"nonfinite_grad"},
    "spike": {"loss_spike", "grad_spike"},
    "error": {"exception"},
    "overflow": set[str](),
    "left": set[str](),
}


class Strikes:
    """Spoils the loss that a fault is for; a replay of it is healthy."""

    def __init__(self, fault: Fault | None, rank: int, overflow: Callable[[], object]) -> None:
        self.fault, self.overflow = fault, overflow
        self.is_over = fault is None or fault.rank != rank or fault.how == "row"  # which is in the data
        self.update = self.part = 0

    def begin(self) -> int:
        self.update, self.part = self.update + 1, 0
        return self.update

    def __call__(self, loss: Tensor) -> Tensor:
        self.part += 1
        if self.is_over or self.fault is None or (self.update, self.part) != self.fault[1:3]:
            return loss
        self.is_over, how = True, self.fault.how
        if how in ("bit", "drift"):
            return loss
        if how in ("error", "left"):
            raise Left if how == "left" else ValueError("of this batch")
        if how == "overflow":
            self.overflow()
        return SPOILED["gradient" if how == "overflow" else how](loss)


class Program:
    """A classifier with BatchNorm and dropout; with the same code for a guard and for a plain loop."""

    def __init__(
        self,
        build: Callable[[nn.Module], Any] = adamw,
        *,
        accumulate: int = 1,
        scale: float = 0.0,
        has_half: bool = False,
        has_objective: bool = False,
        has_average: bool = False,
        net: Callable[[], nn.Module] = Net,
    ) -> None:
        torch.manual_seed(0)
        self.bare, self.clip = net(), 1.0
        built = build(self.bare)
        self.optimizers: list[Any] = built if isinstance(built, list) else [built]
        self.schedules = [OneCycleLR(one, 0.02, 2 * STEPS, cycle_momentum=False) for one in self.optimizers]
        self.accumulate, self.has_half, self.has_objective = accumulate, has_half, has_objective
        self.average = AveragedModel(self.bare) if has_average else None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=8, enabled=scale > 0)
        self.model = DistributedDataParallel(self.bare) if distributed.is_initialized() else self.bare

    def data(self) -> TensorDataset:
        numbers = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(2048, 6, generator=numbers), torch.randint(3, (2048,), generator=numbers))

    def measured(self, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=self.has_half):
            return cross_entropy(self.model, batch)

    def losses(self, batch: Any, spoil: Spoil, update: int) -> Iterator[tuple[Tensor, Any]]:
        """Yield what is handed over, after its backward, and the optimizer that it is for."""
        loss = spoil(self.measured(batch))
        self.scaler.scale(loss / self.accumulate).backward()  # type: ignore[no-untyped-call]
        yield loss, None

    def after_batch(self) -> None:
        """Average the weights, whatever has become of the update."""
        if self.average is not None:
            self.average.update_parameters(self.bare)

    def overflow(self) -> None:
        """Overflow in a forward, where BatchNorm sees it."""
        self.model(torch.full((BATCH, 6), torch.inf))

    @torch.no_grad()
    def damage(self, how: str) -> None:
        """Write to the weights, outside of any update."""
        last = [*self.bare.parameters()][-2]
        last[0, 0] = 1e30 if how == "bit" else last[0, 0]
        last.mul_(50.0 if how == "drift" else 1.0)

    # What a plain loop does.

    def step(self, only: Any) -> None:
        chosen = self.optimizers if only is None else [only]
        for one in chosen:
            self.scaler.unscale_(one)
        clip([weight for one in chosen for group in one.param_groups for weight in group["params"]], self.clip)
        for one in chosen:
            self.scaler.step(one)
            one.zero_grad()

    def end(self, *, overflows: bool = False) -> bool:
        """End an update; say whether it landed, which it did unless it was an overflow."""
        before = self.scaler.get_scale()
        for one in self.optimizers if overflows else ():
            one.param_groups[0]["params"][0].grad = torch.full_like(one.param_groups[0]["params"][0], torch.inf)
            self.scaler.unscale_(one)
            one.zero_grad()
        self.scaler.update()
        if is_landed := self.scaler.get_scale() >= before:
            for schedule in self.schedules:
                schedule.step()
        return is_landed

    def ended(self, weights: dict[str, Tensor], position: int) -> dict[str, Any]:
        return {
            "weights": sha256(weights),
            "buffers": sha256(dict(self.bare.named_buffers())),
            "moments": sha256([one.state_dict()["state"] for one in self.optimizers]),
            "average": None if self.average is None else sha256(self.average.state_dict()),
            "scale": self.scaler.get_scale(),
            "position": position,
        }


class Turns(Program):
    """A critic that steps `times` in an update, and another network that steps once, in every update or every other."""

    def __init__(
        self, kind: str, times: int = 1, every: int = 1, *, scale: float = 0.0, clip: float = 1.0, fused: bool = True
    ) -> None:
        super().__init__(scale=scale)
        self.pair, self.times, self.every = Pair(Accelerator(cpu=True), kind, fused=fused), times, every
        self.model, self.bare, self.clip = self.pair.nets, self.pair.bare, clip
        self.optimizers, self.schedules = [*self.pair.optimizers.values()], []

    def data(self) -> TensorDataset:
        return TensorDataset(*(torch.cat([one] * 4) for one in self.pair.data.tensors))

    def losses(self, batch: Any, spoil: Spoil, update: int) -> Iterator[tuple[Tensor, Any]]:
        critic, other = self.pair.names
        for name in [critic] * self.times + [other] * (update % self.every == 0):
            optimizer = self.pair.optimizers[name]
            optimizer.zero_grad()
            loss = spoil(self.pair.loss(name, batch))
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            yield loss, optimizer

    def overflow(self) -> None:
        pass


class Shared(Turns):
    """A GAN as most are: the generator runs once in a turn, and both losses use what it made."""

    def losses(self, batch: Any, spoil: Spoil, update: int) -> Iterator[tuple[Tensor, Any]]:
        (pictures, noise), nets = batch, self.pair.nets
        made = nets["g"](noise)
        for name, optimizer in self.pair.optimizers.items():
            loss = F.softplus((1 if name == "d" else -1) * nets["d"](made.detach() if name == "d" else made)).mean()
            if name == "d":
                loss = loss + F.softplus(-nets["d"](pictures)).mean()
            optimizer.zero_grad()
            loss = spoil(loss)
            loss.backward()  # type: ignore[no-untyped-call]
            yield loss, optimizer


class Scenario(NamedTuple):
    program: Callable[[], Program]
    fault: Fault | None = None
    guard: dict[str, Any] | None = None  # more options of the guard
    ranks: int = 1
    left_out: bool = True  # the update that is struck
    killed: int = 0  # the step at which the process is killed; another one resumes the run


# ------------------------------------------------------------------------------------------------ optimizers


class Signed(torch.optim.Optimizer):
    """A class of a user's own, which nothing is known about."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state["seen"] = state.get("seen", 0) + 1
                weight -= group["lr"] * weight.grad.sign()


class Projected(torch.optim.AdamW):
    """A torch class with something of a user's own after it: its base heeds the gate, it does not."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight.mul_(0.999)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if weight.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01, fused=True)]


def of(kind: Any, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: kind(model.parameters(), lr=0.01, **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adam-fused": of(optim.Adam, fused=True),
    "adamw-fused": of(optim.AdamW, fused=True),
    "sgd": of(optim.SGD),
    "sgd-momentum-fused": of(optim.SGD, momentum=0.9, fused=True),
    "rmsprop": of(optim.RMSprop),
    "adagrad": of(optim.Adagrad),
    "adafactor": of(optim.Adafactor),
    "muon+adamw": muon_and_adamw,
    "a user's own": of(Signed),
    "a user's own over a fused one": of(Projected, fused=True),
}


def each(program: Program, ranks: int) -> int:
    return BATCH * program.accumulate * ranks


def rows_of(program: Program, fault: Fault | None, ranks: int) -> TensorDataset:
    data = program.data()
    if fault is not None and fault.how == "row":
        at = (fault.at - 1) * each(program, ranks) + ((fault.part - 1) * ranks + fault.rank) * BATCH
        data.tensors[0][at + 3] = torch.nan
    return data


def guarded(row: Scenario, rank: int, run_dir: Path | None = None, *, is_killed: bool = False) -> dict[str, Any]:
    program = row.program()
    strikes = Strikes(row.fault, rank, program.overflow)
    on_disk: dict[str, Any] = (
        {}
        if run_dir is None
        else {"run_dir": run_dir, "disk": 5, "resume": True, "memory": often(5), "verify_after": 3}
    )
    guard = Guard(
        *(None, program.model, program.optimizers),
        data=rows_of(program, row.fault, row.ranks),
        batch_size=BATCH,
        steps=STEPS,
        shuffle=False,
        schedule=program.schedules or None,
        objective=(lambda model, batch: strikes(program.measured(batch))) if program.has_objective else None,
        clip=program.clip,
        accumulate=program.accumulate,
        scaler=program.scaler if program.scaler.is_enabled() else None,
        **{"recovery": SKIP, **on_disk, **(row.guard or {})},
    )
    if program.average is not None:
        guard.keep(average=program.average)
    while guard.clock.step < STEPS:
        with suppress(Left):
            for update in guard.updates():
                number = strikes.begin()
                for batch in update:
                    if program.has_objective:
                        guard.step(batch)
                    else:
                        for loss, optimizer in program.losses(batch, strikes, number):
                            guard.update(loss, optimizer=optimizer)
                    program.after_batch()
                if row.fault is not None and (number, row.fault.how) in (
                    (row.fault.at, "bit"),
                    (row.fault.at, "drift"),
                ):
                    program.damage(row.fault.how)
                if run_dir is not None and is_killed and guard.clock.step >= row.killed:
                    die_with_checkpoint(run_dir)
    guard.close()
    told = program.ended(guard.state.live()["weights"], guard.samples.position // each(program, row.ranks))
    told["met"] = [(str(one.anomaly.signal), one.anomaly.ranks) for one in guard.incidents]
    told["outcomes"] = {one.outcome for one in guard.incidents}
    if row.ranks > 1:
        guard.world.leave()
    return told


def plain(row: Scenario, rank: int) -> dict[str, Any]:
    """The same without a guard, but with its random numbers, and without the update that is to be left out."""
    program, seeds, fault = row.program(), Seeds(0, rank, torch.device("cpu")), row.fault
    # A policy that only observes lets everything land, and so does this loop then.
    is_struck = bool((row.guard or {}).get("recovery", {}).get("observe"))
    strikes = Strikes(fault, rank, program.overflow) if is_struck else None
    data, number, landed = rows_of(program, fault, row.ranks), 0, 0
    while landed < STEPS:
        number += 1
        if fault is not None and number == fault.at and row.left_out:
            if fault.how == "overflow":
                program.end(overflows=True)
            continue
        start = (number - 1) * each(program, row.ranks)
        seeds.for_update(start)
        if strikes is not None:
            strikes.begin()
        for part in range(program.accumulate):
            at = start + (part * row.ranks + rank) * BATCH
            for _, optimizer in program.losses(data[at : at + BATCH], strikes or (lambda loss: loss), number):
                if part == program.accumulate - 1:
                    program.step(optimizer)
            program.after_batch()
        landed += program.end()
        if is_struck and fault is not None and fault.how in ("bit", "drift") and number == fault.at:
            program.damage(fault.how)
    return program.ended(dict(program.bare.named_parameters()), number)


def both_ways(row: Scenario, run_dir: Path | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    rank = int(os.environ.get("RANK", "0"))
    if row.ranks > 1:
        Accelerator(cpu=True)  # the ranks meet
    expected = plain(row, rank)
    return guarded(row, rank, run_dir), expected


def ends_as_its_plain_loop(row: Scenario, ended: list[tuple[int, Any]]) -> None:
    """All ranks end well, after one incident of its kind, or none; each has the buffers of its own rows."""
    assert [code for code, _ in ended] == [0] * row.ranks
    assert len({met["weights"] for _, (met, _) in ended}) == 1
    for _, (met, expected) in ended:
        signals = MEETS[row.fault.how] if row.fault is not None else set()
        found, outcomes = met.pop("met"), met.pop("outcomes")
        found = [one for one in found if one[0] != "crash"]
        assert (len(found), {signal for signal, _ in found} <= signals) == (bool(signals), True), found
        if row.fault is not None and row.ranks > 1:
            assert [ranks for _, ranks in found] == [() if row.fault.how == "gradient" else (row.fault.rank,)]
        assert outcomes <= {"recovered", "observed", None}
        assert met == expected
