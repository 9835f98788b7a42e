"""Faults that a user's own code brings along, in a loop of the user's own: nothing here knows of `drill/`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.nn import functional as F

from resilient_train.adapters.guard import Guard
from resilient_train.errors import GaveUp
from resilient_train.types import Incident
from resilient_train.zoo.data import digits
from resilient_train.zoo.models import MLP

STEPS, AT = 300, 150  # the fault comes at the 150th attempt
WILD = range(AT, AT + 30)  # steps or attempts in which a learning rate is a hundred times what it should be


@dataclass
class Program:
    """A user's training program: rows, model, objective, schedule, and what its loop does after a step."""

    fault: str | None
    model: nn.Module
    rows: list[tuple[Tensor, int]]
    calls: int = 0  # of the objective
    rates: int = 0  # that the schedule was asked for

    def __post_init__(self) -> None:
        if self.fault == "rows with NaN":
            for place in (100, 500, 900):
                image, label = self.rows[place]
                self.rows[place] = torch.full_like(image, math.nan), label
        weight = next(self.model.parameters())
        weight.register_hook(self.spoiled)  # type: ignore[no-untyped-call]

    def spoiled(self, gradient: Tensor) -> Tensor:
        return gradient * math.nan if self._is_now("a hook that makes a gradient NaN") else gradient

    def objective(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        self.calls += 1
        loss = F.cross_entropy(model(images), labels)
        if self.fault == "NaN for certain samples" and bool((images.sum(dim=(1, 2, 3)) > 26).any()):
            return (loss * 0).log() * 0  # the logarithm of zero, times zero
        return loss * 1e4 if self._is_now("a loss times 10,000, once") else loss

    def curve(self, step: int) -> float:
        """The schedule: warm up, then fall in a straight line."""
        self.rates += 1
        factor = min(1.0, (step + 1) / 20) * (1 - 0.9 * step / STEPS)
        wild = {"rate x100 for 30 steps": step, "rate x100 for 30 attempts": self.rates}
        return factor * (100 if wild.get(self.fault or "") in WILD else 1)

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """What the loop does between two updates."""
        weights = list(self.model.parameters())
        if self._is_now("a weight becomes 1e30"):
            weights[0].view(-1)[17] = 1e30
        if self._is_now("a weight becomes NaN"):
            weights[2].view(-1)[3] = math.nan
        if self._is_now("a layer times 10"):
            weights[2].mul_(10)
        if self._is_now("second moments become 0"):
            for state in optimizer.state.values():
                state["exp_avg_sq"].zero_()

    def _is_now(self, fault: str) -> bool:
        return self.fault == fault and self.calls == AT


FAULTS = (
    "rows with NaN",
    "NaN for certain samples",
    "a hook that makes a gradient NaN",
    "a loss times 10,000, once",
    "a weight becomes 1e30",
    "a weight becomes NaN",
    "a layer times 10",
    "second moments become 0",
    "rate x100 for 30 attempts",
    "rate x100 for 30 steps",
)
REFUSED = FAULTS[:4]  # what an update is refused for, and leaves nothing behind
TRANSIENT = FAULTS[2:8]  # what does not come again


@dataclass
class Ended:
    """How a program ended."""

    loss: float
    is_finite: bool
    step: int
    tick: int
    incidents: list[Incident] = field(default_factory=list)
    why: str = ""
    gave_up: bool = False


def trained(fault: str | None, recovery: Any, seed: int) -> Ended:
    """Run the program under a policy."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(seed)
    accelerator, model = Accelerator(cpu=True), MLP()
    program = Program(fault, model, list(zip(*digits("train").tensors, strict=True)))  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), fused=True)
    if recovery == "rewind only":
        recovery = {"ladders": {"default": [{"do": ["rewind"], "strikes": None}]}}
    prepared = accelerator.prepare(model)
    guard = Guard(
        accelerator,
        prepared,
        optimizer,
        data=program.rows,
        batch_size=32,
        steps=STEPS,
        schedule=program.curve,
        objective=program.objective,
        recovery=recovery,
        clip=1.0,
        seed=seed,
    )
    why, gave_up = "", False
    try:
        for batch in guard.batches():
            guard.step(batch)
            program.after(optimizer)
            if guard.clock.tick > 10 * STEPS:
                why = "does not come to an end"
                break
    except GaveUp as error:
        why, gave_up = str(error), True
    is_finite = all(bool(weight.isfinite().all()) for weight in model.parameters())
    return Ended(evaluated(model), is_finite, guard.clock.step, guard.clock.tick, guard.incidents, why, gave_up)


@torch.no_grad()
def evaluated(model: Callable[[Tensor], Tensor]) -> float:
    images, labels = digits("eval").tensors  # type: ignore[attr-defined]
    return F.cross_entropy(model(images), labels).item()
