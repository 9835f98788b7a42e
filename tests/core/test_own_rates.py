"""A loop without `schedule`: what it does to its rates outlasts refused updates and rewinds."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from guarded import REWIND, SKIP, mse, often, sums
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
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(("bad", "recovery"), [(2, SKIP), (20, SKIP), (20, REWIND)])
@pytest.mark.parametrize("form", ["usual", "state of its own", "scheduler kept", "state loaded", "in turn"])
def test_an_incident_changes_no_rate(name: str, bad: int, recovery: Any, form: str) -> None:
    """At the end it is what as many steps of the scheduler make of it; of one that is kept only those that landed."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)) for _ in range(1 + (form == "in turn"))]
    kind: Any = Own if form == "state of its own" else torch.optim.AdamW
    optimizers = [kind(one.parameters(), lr=0.01) for one in nets]
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.01)
    *schedulers, alone = [SCHEDULERS[name](one) for one in (*optimizers, plain)]
    more: dict[str, Any] = {"recovery": recovery, "memory": often(5), "verify_after": 3}
    guard = Guard(None, nn.ModuleList(nets), optimizers, data=sums(), batch_size=16, **more)
    if form == "scheduler kept":
        guard.keep(scheduler=schedulers[0])
    if form == "state loaded":
        optimizers[0].load_state_dict(optimizers[0].state_dict())
    count = 0
    for count, batch in enumerate(guard.batches(40), start=1):
        for model, optimizer in zip(nets, optimizers, strict=True):
            loss = mse(model, batch) * (math.nan if count == bad and model is nets[0] else 1)
            loss.backward()  # type: ignore[no-untyped-call]
            guard.update(loss, optimizer=optimizer if form == "in turn" else None)
        for scheduler in schedulers:
            scheduler.step()
    guard.close()
    assert len(guard.incidents) == 1
    for _ in range(40 if form == "scheduler kept" else count):
        plain.step()
        alone.step()
    for optimizer in optimizers:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(plain.param_groups[0]["lr"])


class Interrupted(torch.optim.SGD):
    is_due = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.is_due:
            raise KeyboardInterrupt
        super().step()


@pytest.mark.parametrize("own", [True, False])
def test_nor_does_a_step_that_is_interrupted(own: bool) -> None:
    """A cell of a notebook is run again: with rates of the loop's, or with a schedule of the guard's."""
    model = nn.Linear(6, 1)
    optimizer = Interrupted(model.parameters(), lr=0.01)
    schedule = None if own else ExponentialLR(optimizer, 0.9)
    guard = Guard(None, model, optimizer, data=sums(), batch_size=16, schedule=schedule)
    guard._controls.knobs.lr = 0.5
    for is_first in (True, False):
        with pytest.raises(KeyboardInterrupt) if is_first else nullcontext():
            for batch in guard.batches(5):
                optimizer.is_due = is_first and guard.attempted_step == 3
                loss = mse(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                guard.update(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 if own else 0.005 * 0.9 ** (guard.clock.step - 1))
