"""A GPU that is lost: what the host saves. A real one is in tests/gpu; here an error is made."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import mse, often, sums
from guarded import trained as train
from torch import nn

from resilient_train.extensions import exceptions, lost_device
from resilient_train.loop import reporter
from resilient_train.loop.guard import Guard

BAD = 17


@pytest.fixture(autouse=True)
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_lost(error: BaseException | None) -> bool:
        return isinstance(error, torch.AcceleratorError)

    for room in (lost_device, exceptions, reporter):
        monkeypatch.setattr(room, "is_lost_device", is_lost)


def guarded(run_dir: Path, late: int) -> Guard:
    """A run of which a row ends the device, from one of its updates on."""
    torch.manual_seed(0)
    model, data = nn.Linear(6, 1), sums()
    data.tensors[0][BAD, 0] = 999.0
    calls: list[int] = []

    def objective(net: Any, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) > late and (batch[0] > 99).any():
            raise torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`")
        return mse(net, (batch[0].clamp(max=9.0), batch[1]))

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    on_disk: dict[str, Any] = {"run_dir": run_dir, "disk": 0, "memory": often(2), "verify_after": 2, "resume": True}
    return Guard(None, model, optimizer, data=data, batch_size=16, steps=140, objective=objective, **on_disk)


def test_the_newest_verified_state_is_saved_and_the_samples_are_skipped_in_the_end(tmp_path: Path) -> None:
    """Two ends at the same samples count; in the next epoch other samples have the row."""
    reached = []
    for late in (60, 0, 0):
        guard = guarded(tmp_path / "run", late)
        with pytest.raises(torch.AcceleratorError, match="device-side") as raised, closing(guard):
            train(guard, 140)
        assert "cannot use the GPU any more" in raised.value.__notes__[0]
        reached.append(guard.clock.step)
    first, second, third = reached
    assert 60 < first == second < third, "each resumed from what the one before it has saved"
    assert {one.anomaly.signal for one in guard.incidents} == {"crash"}
    assert BAD in guard.incidents[-1].diagnosis.rows
