"""A loop of plain PyTorch, without an Accelerator, under the guard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from group import agreed, alone
from guarded import Net, rows
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from resilient_train import Guard
from resilient_train.data.trees import sha256
from resilient_train.loop import arguments

STEPS = 40


def on_a_rank(run_dir: Path) -> list[Any]:
    """A script that torchrun has started: it joins its group, and wraps its model."""
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    guard = Guard(None, model, optimizer, data=rows(), batch_size=16, steps=STEPS, run_dir=run_dir)
    for number, (x, y) in enumerate(guard.batches()):
        loss = F.cross_entropy(model(x * torch.nan if number == 20 and guard.world.rank else x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        guard.update(loss)
    guard.close()
    found = [[*incident.anomaly.ranks] for incident in guard.incidents], sha256(dict(model.named_parameters()))
    guard.world.leave()
    return [*found]


def test_processes_that_a_launcher_has_started_are_one_run(tmp_path: Path) -> None:
    """Which refuses the bad batch of rank 1."""
    ranks, _ = agreed(2, on_a_rank, tmp_path / "run")
    assert ranks == [[1]]
    assert not (tmp_path / "run-2").exists()


@pytest.mark.usefixtures("fresh_accelerate")
def test_processes_that_no_launcher_has_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `torch.multiprocessing.spawn`: no variable names their rank, and each would believe that it is alone."""
    made = Accelerator(cpu=True)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"has 2 processes, and Accelerate knows 1: start them with torchrun or"):
        arguments.world(made)


def devices_of_guards(*several: str) -> list[str]:
    found = []
    for name in several:
        with FakeTensorMode():
            model = nn.ParameterList([nn.Parameter(torch.empty(2, device=name))])
        made = arguments.accelerator(None, model)
        found += [str(made.device), str(arguments.world(made).device)]
    return [*found, str(PartialState().device), str(os.environ.get("ACCELERATE_TORCH_DEVICE"))]


def test_the_device_is_that_of_the_model() -> None:
    """Also of a second model in the process; no device has to be there for this."""
    several = ["cuda:1", "cpu", "cuda:3"]
    code, found = alone(devices_of_guards, *several)
    assert code == 0
    assert found == [*(name for name in several for _ in range(2)), "cuda:1", "None"]
