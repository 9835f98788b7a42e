"""A loop without `schedule`: what it does to its rates outlasts refused updates and rewinds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guarded import REWIND, SKIP, often, sums
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, LRScheduler, MultiStepLR

from resilient_train import Guard


class Own(torch.optim.AdamW):
    """Its state is loaded by `load_state_dict`, as it overrides `state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": 1}


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "milestone": lambda optimizer: MultiStepLR(optimizer, [20], 0.1),
    "warm-up": lambda optimizer: LinearLR(optimizer, 0.1, 1.0, 25),
    "decay": lambda optimizer: ExponentialLR(optimizer, 0.9),
}


def trained(name: str, bad: int | None, recovery: Any, kind: type[Optimizer], *, loads: bool) -> tuple[float, float]:
    """Return the rate at the end, and what the scheduler would have made of it by as many steps in a plain loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer: Any = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    scheduler = SCHEDULERS[name](optimizer)
    guard = Guard(
        None, model, optimizer, data=sums(), batch_size=16, recovery=recovery, memory=often(5), verify_after=3
    )
    if loads:
        optimizer.load_state_dict(optimizer.state_dict())
    count = 0
    for x, y in guard.batches(40):
        count += 1
        loss: torch.Tensor = nn.functional.mse_loss(model(x), y) * (math.nan if count == bad else 1.0)
        loss.backward()  # type: ignore[no-untyped-call]
        guard.update(loss)
        scheduler.step()
    guard.close()
    assert len(guard.incidents) == (bad is not None)
    alone = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.01)
    plain = SCHEDULERS[name](alone)
    for _ in range(count):
        alone.step()
        plain.step()
    return optimizer.param_groups[0]["lr"], alone.param_groups[0]["lr"]


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(("bad", "recovery"), [(2, SKIP), (20, SKIP), (20, REWIND)])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Own])
def test_an_incident_changes_no_rate(name: str, bad: int, recovery: Any, kind: type[Optimizer]) -> None:
    here, there = trained(name, bad, recovery, kind, loads=False)
    assert here == pytest.approx(there)


def test_nor_does_a_state_that_the_loop_has_loaded() -> None:
    here, there = trained("decay", None, SKIP, torch.optim.AdamW, loads=True)
    assert here == pytest.approx(there)
