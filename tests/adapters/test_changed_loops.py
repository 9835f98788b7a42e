"""Loops that change their model or optimizer in the middle: what they change is adopted, and rewinds with the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import is_finite, mse, sums
from test_own_recipes import backward
from torch import nn
from torch.nn.utils import prune
from torch.optim.lr_scheduler import StepLR

from resilient_train import Guard
from resilient_train.ground.errors import TrainError

AT, STRUCK, STEPS = 30, 40, 100  # the steps of a change and of damage, and the end


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def prunes(model: Any, optimizer: Any) -> None:
    prune.l1_unstructured(model[0], "weight", amount=0.25)  # type: ignore[no-untyped-call]


def adds_a_group(model: Any, optimizer: Any) -> None:
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 1e-3})


def unfreezes(model: Any, optimizer: Any) -> None:
    model[0].requires_grad_(True).weight.register_hook(lambda grad: 1000 * grad)  # far larger than those of the head


CHANGES = [prunes, adds_a_group, unfreezes]


def made(change: Callable[..., None]) -> tuple[Guard, Any]:
    model = network()
    model[0].requires_grad_(change is prunes)
    optimizer = torch.optim.AdamW((model[2] if change is adds_a_group else model).parameters(), 1e-2)
    schedule = None if change is adds_a_group else StepLR(optimizer, 20, 0.9)
    guard = Guard(None, model, optimizer, data=sums(256), batch_size=16, steps=STEPS, schedule=schedule)
    struck = changed = False
    for x, y in guard.batches():
        if guard.attempted_step == AT and not changed:
            changed = True
            change(model, optimizer)
        if guard.attempted_step == STRUCK and not struck:
            struck = True
            with torch.no_grad():
                next(model[0].parameters()).fill_(math.nan)
        guard.update(backward(model, x, y))
    guard.close()
    return guard, model


@pytest.mark.parametrize("change", CHANGES)
def test_a_rewind_passes_over_a_change_of_the_loop(change: Callable[..., None]) -> None:
    """Renamed weights get their values of then, an added group stays, and the run ends well, as it was changed."""
    guard, model = made(change)
    [incident] = guard.incidents
    assert incident.rewound_to in range(AT)
    assert incident.outcome == "recovered"
    assert guard.clock.step == STEPS
    names = dict(model.named_parameters()).keys()
    assert (names >= {"0.weight_orig"}) == (change is prunes)
    assert len(guard.state.optimizers[0].param_groups) == 1 + (change is adds_a_group)
    assert mse(model, sums(256).tensors) < 2.5


def test_an_added_group_trains_as_without_the_guard() -> None:
    """Bit for bit, with the rate that it was added with; a scheduler that the guard steps does not know it."""
    final = []
    for is_guarded in (False, True):
        model, data = network(), sums(256)
        optimizer = torch.optim.SGD(model[2].parameters(), 1e-2, momentum=0.9)
        batches: Any = [data[at % 256 : at % 256 + 16] for at in range(0, 16 * AT, 16)]
        if is_guarded:
            guard = Guard(None, model, optimizer, data=data, batch_size=16, shuffle=False, clip=None)
            batches = guard.batches(AT)
        for number, (x, y) in enumerate(batches):
            if number == 15:
                optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 5e-3})
            loss = backward(model, x, y)
            if is_guarded:
                guard.update(loss)
                continue
            optimizer.step()
            optimizer.zero_grad()
        final.append([one.tolist() for one in model.parameters()])
    assert final[0] == final[1]
    guard = Guard(None, model, optimizer, data=data, batch_size=16, schedule=StepLR(optimizer, 10))
    with pytest.raises(TrainError, match="a parameter group that its schedule does not know"):  # noqa: PT012
        for x, y in guard.batches(2):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(()))]})
            guard.update(backward(model, x, y))


def test_a_resume_goes_back_to_before_a_group_was_added(tmp_path: Path) -> None:
    """A loop that has not added it yet resumes from a checkpoint with as many groups, and says why."""
    final = []
    for part in (70, 60):
        model = network()
        optimizer = torch.optim.AdamW(model[2].parameters(), 1e-2)
        guard = Guard(None, model, optimizer, data=sums(256), batch_size=16, run_dir=tmp_path, disk=25, resume=True)
        for x, y in guard.batches(part):
            if guard.attempted_step >= 60 and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": [*model[0].parameters()]})
            guard.update(backward(model, x, y))
        final.append((guard.clock.step, len(optimizer.param_groups)))
        guard.leave()
        guard.close()
    assert [final[0], final[1][1]] == [(70, 2), 2]
    [incident] = guard.incidents
    assert "it has 2 parameter groups there and 1 here" in incident.anomaly.evidence[0]["why"]


@pytest.mark.parametrize("how", ["alone", "to the group"])
def test_what_a_loop_has_added_is_kept_from_a_bad_update(how: str) -> None:
    """Weights, and the statistics of a layer."""
    model, added = network(), nn.BatchNorm1d(1)
    model.register_buffer("none", None)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    guard = Guard(None, model, optimizer, data=sums(), batch_size=16, steps=AT)
    for number, (x, y) in enumerate(guard.batches()):
        if number == 10:
            model.append(added)
            if how == "to the group":
                optimizer.param_groups[0]["params"] += added.parameters()
            else:
                optimizer.add_param_group({"params": added.parameters()})
        assert added.bias.grad is None
        loss = backward(model, x, y)
        if number in (9, 20):  # before and after
            model(math.nan * x)
            (added if number == 20 else model[2]).bias.grad = torch.tensor([math.nan])
        guard.update(loss)
    assert is_finite(model)
    assert model.none is None
