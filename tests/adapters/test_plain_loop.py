"""A loop of plain PyTorch, without an Accelerator, under the guard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from guarded import Net, rows
from torch import nn
from torch.nn import functional as F

from resilient_train import Guard
from resilient_train.state.tree import sha256

STEPS = 40


def trained(how: str, tmp_path: Path, *, strikes: bool = False) -> tuple[str, Guard]:
    torch.manual_seed(0)
    model: Any = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    accelerator = None
    if how == "accelerate":
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
    guard = Guard(accelerator, model, optimizer, data=rows(), batch_size=16, steps=STEPS, run_dir=tmp_path / how)
    for number, (x, y) in enumerate(guard.batches()):
        if strikes and number == 20:
            x = x * torch.nan
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        guard.update(loss)
    guard.close()
    return sha256(dict(model.named_parameters())), guard


def test_it_trains_as_with_accelerate(tmp_path: Path) -> None:
    plain, guard = trained("plain", tmp_path)
    assert plain == trained("accelerate", tmp_path)[0]
    assert guard.clock.step == STEPS
    assert guard.incidents == []


def test_a_nan_is_refused(tmp_path: Path) -> None:
    _, guard = trained("plain", tmp_path, strikes=True)
    [incident] = guard.incidents
    assert incident.anomaly.signal == "nonfinite_loss"
    assert all(weight.isfinite().all() for weight in guard.model.parameters())


def test_what_is_no_accelerator_is_refused() -> None:
    with pytest.raises(TypeError, match=r"accelerator: expected an accelerate\.Accelerator, or None for .*, got str"):
        Guard("cpu", nn.Linear(2, 1), None, data=rows(), batch_size=4)
