"""A GPU that is lost: what the host saves and finds out. A real one is in tests/gpu; here an error is made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from guarded import mse, sums
from guarded import trained as train
from torch import nn
from torch.nn import functional as F

from resilient_train.extensions import exceptions, lost_device
from resilient_train.loop import reporter
from resilient_train.loop.guard import Guard

BAD = 17


class Lost(nn.Module):
    """A model with a buffer that its state_dict leaves out, a weight under two names, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.same = self.embedding
        self.register_buffer("mask", torch.ones(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embedding(x)) * self.mask)
        return out


def test_it_may_show_where_the_next_batch_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    guard = Guard(None, model, optimizer, data=sums(), batch_size=16, run_dir=tmp_path / "run", objective=mse)
    copies = 0

    def on_device(batch: Any) -> Any:
        nonlocal copies
        copies += 1
        if copies == 5:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        return batch

    monkeypatch.setattr(guard.world, "on_device", on_device)
    with pytest.raises(torch.AcceleratorError) as raised, closing(guard):
        train(guard, 20)
    (note,) = raised.value.__notes__
    assert "cannot use the GPU any more" in note


def trained(run_dir: Path, found: Callable[[torch.Tensor], torch.Tensor], *, late: int = 0) -> Guard:
    """Train; on the device a token out of range raises what CUDA does, and on the host what `found` makes of it."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 10, (256,))
    labels, tokens[BAD] = tokens % 2, 999
    model = Lost()
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    calls: list[int] = []

    def objective(net: Any, batch: Any) -> torch.Tensor:
        calls.append(1)
        rows = batch[0]
        if len(calls) <= late:  # not yet
            rows = rows.where(rows < 10, 3)
        if net is prepared and (rows > 9).any():
            raise torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`")
        return F.cross_entropy(net(rows if net is prepared else found(rows)), batch[1])

    data = torch.utils.data.TensorDataset(tokens, labels)
    given: dict[str, Any] = {"data": data, "batch_size": 16, "run_dir": run_dir, "disk": 0, "resume": True}
    with closing(Guard(accelerator, prepared, optimizer, objective=objective, **given)) as guard:
        return train(guard, 100)


def refuses(rows: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("no kernel for a CPU")


@pytest.fixture(autouse=True)
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_lost(error: BaseException | None) -> bool:
        return isinstance(error, torch.AcceleratorError)

    for room in (lost_device, exceptions, reporter):
        monkeypatch.setattr(room, "is_lost_device", is_lost)


def test_the_row_is_found_on_the_host_and_left_out_by_the_next_process(tmp_path: Path) -> None:
    """With its line, from the newest verified state, and as an incident that the next process closes."""
    with pytest.raises(torch.AcceleratorError) as raised:
        trained(tmp_path / "run", lambda rows: rows, late=60)
    (note,) = raised.value.__notes__
    assert f"with row {BAD} alone" in note
    assert "test_lost_device.py" in note
    guard = trained(tmp_path / "run", lambda rows: rows)
    (incident,) = guard.incidents
    assert [incident.diagnosis.cause, incident.diagnosis.rows, incident.outcome] == ["data", (BAD,), "recovered"]
    assert 0 < incident.steps_lost < 50
    assert guard.clock.step == 100


@pytest.mark.parametrize("found", [refuses, lambda rows: rows.where(rows < 10, 3)], ids=["no CPU", "not on a CPU"])
def test_nothing_is_blamed_where_the_host_finds_nothing(found: Any, tmp_path: Path) -> None:
    """Neither where all rows raise nor where none does: two ends at the same samples count, and then those of two."""
    for _ in range(4):
        with pytest.raises(torch.AcceleratorError, match="device-side") as raised:
            trained(tmp_path / "run", found, late=2)
        assert "with row" not in raised.value.__notes__[0]
    guard = trained(tmp_path / "run", found, late=2)
    assert {one.anomaly.signal for one in guard.incidents} == {"crash"}
    assert BAD in guard.incidents[-1].diagnosis.rows
    assert len(guard.incidents[-1].diagnosis.rows) < 4
    assert guard.clock.step == 100
