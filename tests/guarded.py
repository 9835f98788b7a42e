"""A small model, objectives that spoil an update, and a guard around them: what tests of updates train with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

from resilient_train.ground.reader import MemoryConfig
from resilient_train.ground.types import Incident
from resilient_train.loop.guard import Guard

ROWS = 256
SKIP = {"ladders": {"default": [{"do": ["skip"], "strikes": None}]}}
REWIND = {"ladders": {"default": [{"do": ["rewind"], "strikes": None}]}}


class Net(nn.Module):
    """BatchNorm and dropout: a forward changes buffers and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.layers(x))
        return scores


def cross_entropy(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Poison:
    """An objective that spoils its loss or its gradients in the updates that it is told."""

    def __init__(self, how: str) -> None:
        self.how, self.strikes = how, False

    def __call__(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        rows, labels = batch
        if self.strikes and self.how == "batch":
            rows = torch.full_like(rows, torch.nan)
        loss = cross_entropy(model, (rows, labels))
        if self.strikes and self.how == "loss":
            return loss * torch.inf
        if self.strikes and self.how == "gradient":
            return loss + (loss * 0.0).sqrt()  # its value is 0 and its slope NaN
        if self.strikes and self.how == "spike":
            return loss * 1e6
        return loss


def rows() -> list[tuple[torch.Tensor, int]]:
    made = torch.Generator().manual_seed(0)
    return [(torch.randn(6, generator=made), number % 3) for number in range(ROWS)]


def guarded(build: Callable[[nn.Module], Any], objective: Any, *, accumulation: int = 1, **more: Any) -> Guard:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = Net()
    optimizer = build(model)
    schedule = None
    if not isinstance(optimizer, list):
        schedule = OneCycleLR(optimizer, max_lr=0.01, total_steps=2000, cycle_momentum=False)
    prepared = accelerator.prepare(model)
    return Guard(accelerator, prepared, optimizer, data=rows(), batch_size=8, schedule=schedule, objective=objective,
                 clip=1.0, **{"recovery": SKIP, **more})  # fmt: skip


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


class At:
    """An objective that is spoiled in some of its calls, counted from 1."""

    def __init__(self, how: str, *calls: int) -> None:
        self.poison, self.calls, self.count = Poison(how), set(calls), 0

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        self.count += 1
        self.poison.strikes = self.count in self.calls
        return self.poison(model, batch)


def sums(count: int = 512, width: int = 6, seed: int = 3, bad: tuple[int, ...] = ()) -> TensorDataset:
    """Rows of noise and what they add up to; the bad ones hold NaN."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    y = x.sum(1, keepdim=True)
    x[list(bad)] = torch.nan
    return TensorDataset(x, y)


def guard_over(data: Any, **given: Any) -> Guard:
    """A regression of six columns, which keeps snapshots often: for tests of where rows come from."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    given = {"batch_size": 16, "memory": often(5), "verify_after": 3, **given}
    return Guard(accelerator, model, optimizer, data=data, **given)


def mse(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def often(every: int) -> MemoryConfig:
    """Snapshots after so many updates, however large they are."""
    return MemoryConfig(every=every, keep=4, max_gib=None)


def is_finite(model: Any) -> bool:
    """All of its weights and buffers."""
    return all(bool(one.isfinite().all()) for one in model.state_dict().values())


def accused(incidents: Iterable[Incident]) -> list[int]:
    """The rows that are called bad."""
    return sorted(row for one in incidents for row in one.diagnosis.rows)


def trained(guard: Guard, steps: int | None = None) -> Guard:
    """Train as long as is planned, or so many steps."""
    guard.steps = steps or guard.steps
    for batch in guard.batches():
        guard.step(batch)
    return guard


def handed_over(guard: Guard, objective: Any, steps: int | None = None) -> Guard:
    """The same in a loop that makes forward and backward itself."""
    guard.steps = steps or guard.steps
    for batch in guard.batches():
        loss = objective(guard.model, batch)
        guard.world.accelerator.backward(loss)
        guard.update(loss)
    return guard
