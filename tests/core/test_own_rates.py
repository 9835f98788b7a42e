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
@pytest.mark.parametrize(("bad", "recovery"), [(2, SKIP), (20, REWIND)])
@pytest.mark.parametrize("form", ["usual", "state of its own", "scheduler kept", "state loaded"])
def test_an_incident_changes_no_rate(name: str, bad: int, recovery: Any, form: str) -> None:
    """At the end it is what as many steps of the scheduler make of it; of one that is kept only those that landed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    kind: Any = Own if form == "state of its own" else torch.optim.AdamW
    optimizer, plain = kind(model.parameters(), lr=0.01), torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.01)
    scheduler, alone = SCHEDULERS[name](optimizer), SCHEDULERS[name](plain)
    more: dict[str, Any] = {"recovery": recovery, "memory": often(5), "verify_after": 3}
    guard = Guard(None, model, optimizer, data=sums(), batch_size=16, **more)
    if form == "scheduler kept":
        guard.keep(scheduler=scheduler)
    if form == "state loaded":
        optimizer.load_state_dict(optimizer.state_dict())
    count = 0
    for count, (x, y) in enumerate(guard.batches(40), start=1):
        loss = mse(model, (x, y)) * (math.nan if count == bad else 1)
        loss.backward()  # type: ignore[no-untyped-call]
        guard.update(loss)
        scheduler.step()
    guard.close()
    assert len(guard.incidents) == 1
    for _ in range(40 if form == "scheduler kept" else count):
        plain.step()
        alone.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(plain.param_groups[0]["lr"])


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("bad", [2, 20])
def test_a_turn_that_is_refused_changes_no_rate(name: str, bad: int) -> None:
    pair = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in pair]
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.01)
    schedulers = [SCHEDULERS[name](one) for one in (*optimizers, plain)]
    guard = Guard(None, pair, optimizers, data=sums(), batch_size=16, recovery=SKIP)
    for number, batch in enumerate(guard.batches(40), start=1):
        for model, optimizer in zip(pair, optimizers, strict=True):
            loss = mse(model, batch) * (math.nan if number == bad and model is pair[0] else 1)
            loss.backward()  # type: ignore[no-untyped-call]
            guard.update(loss, optimizer=optimizer)
        plain.step()
        for scheduler in schedulers:
            scheduler.step()
    assert len(guard.incidents) == 1
    assert len({round(one.param_groups[0]["lr"], 12) for one in (*optimizers, plain)}) == 1


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
