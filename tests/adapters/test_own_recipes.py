"""What people do first in a loop of their own: the guarded loop ends as the plain one, and rewinds all that it can."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import sums
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CyclicLR, ReduceLROnPlateau

from resilient_train import Guard
from resilient_train.ground.errors import DirectoryInUse

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata
BATCH, STEPS = 8, 60


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


def backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def cyclic(optimizer: Any) -> Any:
    return CyclicLR(optimizer, 0.001, 0.01, step_size_up=5, cycle_momentum=True)


def plateau(optimizer: Any) -> Any:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.5)


@pytest.mark.parametrize("scheduled", [cyclic, plateau])
def test_a_schedule_makes_of_a_loop_what_torch_makes_of_it(scheduled: Callable[[Any], Any]) -> None:
    """To the last bit: a cycled momentum, and a rate that the loop lowers by a metric with the scheduler's `step`."""
    final = []
    for is_guarded in (False, True):
        model, optimizer = built()
        schedule, used = scheduled(optimizer), list[float]()
        guard = None
        if is_guarded:
            guard = Guard(None, model, optimizer, data=batches, batch_size=BATCH, steps=STEPS, schedule=schedule)
        for _, (x, y) in zip(range(STEPS), guard.batches() if guard else batches(), strict=False):
            loss = backward(model, x, y)
            if guard is not None:
                guard.update(loss)
            else:
                optimizer.step()
                optimizer.zero_grad()
            used.append(optimizer.param_groups[0]["lr"])
            if scheduled is plateau:
                schedule.step(loss.item())
            elif guard is None:
                schedule.step()
        final.append((used, model.weight.tolist()))
    assert final[0] == final[1]
    assert len(set(final[0][0])) > 2


def test_a_generator_function_is_called_again_when_it_ends() -> None:
    """Its batches are those of a loader without a length."""

    def once() -> Iterator[tuple[Tensor, ...]]:
        for _, batch in zip(range(20), batches(), strict=False):
            yield batch

    model, optimizer = built()
    guard = Guard(None, model, optimizer, data=once, steps=50)
    seen = []
    for x, y in guard.batches():
        seen.append(x[0, 0].item())
        guard.update(backward(model, x, y))
    guard.close()
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
        model, optimizer = built()
        guard = Guard(None, model, optimizer, data=loader, run_dir=tmp_path, disk=5, resume=True)
        for x, y in guard.batches(part):
            seen.append(x[0, 0].item())
            guard.update(backward(model, x, y))
        guard.leave()
        guard.close()
    assert (len(set(seen)) == 20) == is_stateful
    assert ("begins again at its first batch" in info.text) != is_stateful


@pytest.mark.parametrize("how", ["completed", "left", "gone"])
def test_a_cell_that_is_run_again_takes_its_run_over(tmp_path: Path, how: str) -> None:
    """A guard of the same process that completed its run, or whose loop was left, gives its directory to a new one."""

    def cell(steps: int, leave_at: int | None = None) -> Guard:
        model, optimizer = built()
        guard = Guard(
            *(None, model, optimizer),
            data=rows(),
            batch_size=BATCH,
            steps=steps,
            run_dir=tmp_path / "run",
            disk=5,
            resume=True,
        )
        for x, y in guard.batches():
            guard.update(backward(model, x, y))
            if guard.attempted_step == leave_at:
                break
        return guard

    kept = [cell(30, None if how == "completed" else 17)]  # as a notebook keeps the newest guard
    if how == "gone":
        kept.clear()
        gc.collect()
    again = cell(60)
    assert again.clock.step == 60
    assert again.clock.tick < 80  # it has resumed
    again.close()


def test_a_run_without_its_directory_is_not_called_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody removed it: what the run met is not known any more."""
    model, optimizer = built()
    guard = Guard(None, model, optimizer, data=rows(), batch_size=BATCH, steps=5, run_dir=tmp_path / "run")
    for x, y in guard.batches():
        guard.update(backward(model, x, y))
    shutil.rmtree(tmp_path / "run")
    guard.close()
    assert "the run directory is gone" in caplog.text
    assert "well" not in caplog.text


def test_a_loop_that_runs_keeps_its_directory(tmp_path: Path) -> None:
    model, optimizer = built()
    more: dict[str, Any] = {"run_dir": tmp_path, "disk": 5, "resume": True}
    guard = Guard(None, model, optimizer, data=rows(), batch_size=BATCH, steps=10, **more)
    for x, y in guard.batches():
        with pytest.raises(DirectoryInUse, match="another guard of this process"):
            Guard(None, *built(), data=rows(), batch_size=BATCH, steps=10, **more)
        guard.update(backward(model, x, y))
    guard.close()
    assert guard.clock.step == 10


@pytest.mark.parametrize("seed", range(2))  # the row comes at other distances from the newest scan
def test_a_bad_row_that_the_loop_puts_into_the_weights_is_named(seed: int) -> None:
    """Two passes of SAM write the NaN of a batch into the weights: the row is left out, and they are restored."""
    model, optimizer = built()
    guard = Guard(None, model, optimizer, data=rows(bad=(77,)), batch_size=BATCH, steps=40, seed=seed)
    for x, y in guard.batches():
        backward(model, x, y)
        ascents = [one.grad * 0.01 / one.grad.norm() for one in model.parameters() if one.grad is not None]
        with torch.no_grad():
            for weight, ascent in zip(model.parameters(), ascents, strict=True):
                weight.add_(ascent)
        optimizer.zero_grad()
        loss = backward(model, x, y)
        with torch.no_grad():
            for weight, ascent in zip(model.parameters(), ascents, strict=True):
                weight.sub_(ascent)
        guard.update(loss)
    guard.close()
    [incident] = guard.incidents
    assert (incident.diagnosis.cause, incident.diagnosis.rows) == ("data", (77,))
    assert incident.outcome == "recovered"
    assert bool(model.weight.isfinite().all())
