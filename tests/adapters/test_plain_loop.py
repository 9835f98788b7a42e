"""A loop of plain PyTorch, without an Accelerator, under the guard."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, PartialState
from fork_server import Forked
from group import alone, ended
from guarded import Net, rows
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from resilient_train import Guard
from resilient_train.data.trees import sha256
from resilient_train.loop import arguments

STEPS = 40


def on_a_rank(rank: int, folder: Path, knows_accelerate: bool) -> None:
    """What a function that torch.multiprocessing.spawn calls does: no variable names its rank."""
    if knows_accelerate:
        Accelerator(cpu=True)
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    try:
        guard = Guard(None, model, optimizer, data=rows(), batch_size=16, steps=STEPS, run_dir=folder / "run")
    except ValueError as error:
        (folder / f"{rank}.txt").write_text(str(error))
        return
    for number, (x, y) in enumerate(guard.batches()):
        loss = F.cross_entropy(model(x * torch.nan if number == 20 and rank == 1 else x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        guard.update(loss)
    guard.close()
    met = [incident.anomaly.ranks for incident in guard.incidents]
    (folder / f"{rank}.txt").write_text(f"{met} {sha256(dict(model.named_parameters()))} {'RANK' in os.environ}")
    guard.world.leave()


@pytest.mark.parametrize("knows_accelerate", [False, True])
def test_processes_that_no_launcher_has_started(knows_accelerate: bool, tmp_path: Path) -> None:
    """They are one run, which refuses the bad batch of rank 1; or Accelerate believed too early that it is alone."""
    assert ended([Forked(on_a_rank, rank, tmp_path, knows_accelerate) for rank in (0, 1)]) == [0, 0]
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in (0, 1))
    assert first == second
    assert not (tmp_path / "run-2").exists()
    if knows_accelerate:
        assert first.startswith("accelerator: torch.distributed has 2 processes, and Accelerate knows 1")
        assert "\n" not in first
    else:
        assert first.startswith("[(1,)]")
        assert first.endswith("False")


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
