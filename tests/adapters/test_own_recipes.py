"""What people do first in a loop of their own: the guarded loop ends as the plain one, and rewinds all that it can."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import sums
from torch import Tensor, nn
from torch.nn import functional as F

from resilient_train import Guard
from resilient_train.ground.errors import DirectoryInUse

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata
BATCH = 8


rows = partial(sums, 160, 4)


def batches() -> Iterator[tuple[Tensor, ...]]:
    data = rows()
    while True:
        for at in range(0, len(data), BATCH):
            yield data[at : at + BATCH]


def built() -> tuple[nn.Linear, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def guard_of(**more: Any) -> Guard:
    return Guard(None, *built(), **{"data": rows(), "batch_size": BATCH, **more})


def trained(guard: Guard, steps: int | None = None, leave_at: int | None = None) -> list[float]:
    """Train, and return the first number of each batch."""
    seen = []
    for x, y in guard.batches(steps):
        seen.append(x[0, 0].item())
        guard.update(backward(guard.model, x, y))
        if guard.attempted_step == leave_at:
            break
    return seen


def backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def test_a_generator_function_is_called_again_when_it_ends() -> None:
    """Its batches are those of a loader without a length."""

    def once() -> Iterator[tuple[Tensor, ...]]:
        for _, batch in zip(range(20), batches(), strict=False):
            yield batch

    seen = trained(guard_of(data=once, batch_size=None, steps=50))
    assert len(seen) == 50
    assert seen[20:40] == seen[:20]


@pytest.mark.parametrize("is_stateful", [False, True])
def test_a_resume_says_if_the_data_begins_again(
    tmp_path: Path, info: pytest.LogCaptureFixture, is_stateful: bool
) -> None:
    """A loader with a state continues where the run stopped, and nothing is said; others begin again, in one line."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    seen = []
    for part in (10, 10):
        torch.manual_seed(3)
        loader = loaders.StatefulDataLoader(rows(), BATCH) if is_stateful else batches()
        guard = guard_of(data=loader, batch_size=None, run_dir=tmp_path, disk=5, resume=True)
        seen += trained(guard, part)
        guard.leave()
        guard.close()
    assert (len(set(seen)) == 20) == is_stateful
    assert ("begins again at its first batch" in info.text) != is_stateful


def test_a_run_of_a_guard_whose_loop_was_left_is_resumed_once_that_is_closed(tmp_path: Path) -> None:
    """As by a cell of a notebook that is run again."""
    more: dict[str, Any] = {"run_dir": tmp_path / "run", "disk": 5, "resume": True}
    left = guard_of(steps=30, **more)
    trained(left, leave_at=17)
    with pytest.raises(DirectoryInUse, match=r"another guard of this process: call its close\(\) first, or restart"):
        guard_of(steps=60, **more)
    left.close()
    again = guard_of(steps=60, **more)
    trained(again)
    assert again.clock.step == 60
    assert again.clock.tick < 80  # it has resumed
    again.close()
