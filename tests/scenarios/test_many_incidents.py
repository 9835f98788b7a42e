"""What the last of many incidents costs: in bytes on the disk and in lines of Python, which no busy machine changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from resilient_train import Guard
from resilient_train.extensions.quarantine import RowsLeftOut
from resilient_train.ground import files
from resilient_train.loop.arguments import policy as named
from resilient_train.report.story import read_story

BAD_EVERY, BATCH = 8, 4
EARLY, LATE, ENOUGH = range(50, 65), range(120, 135), 135


class Counted(files.Disk):
    """The disk, and what this thread has written to it."""

    written = syncs = 0

    def write(self, descriptor: int, data: memoryview, at: int) -> int:
        self.written += len(data) * (threading.current_thread() is threading.main_thread())
        return super().write(descriptor, data, at)

    def sync(self, descriptor: int) -> None:
        self.syncs += threading.current_thread() is threading.main_thread()


@contextmanager
def counted_lines() -> Iterator[list[int]]:
    """Count the lines of Python that this thread runs; those of loops and comprehensions each time."""
    lines, before = [0], sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        lines[0] += 1
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def test_the_last_of_many_incidents_costs_what_an_early_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a row that is NaN, put in quarantine.

    But for the list of these rows, which is written whole with each of them: a policy allows for a thousand.
    """
    monkeypatch.setattr(files, "disk", disk := Counted())
    monkeypatch.setattr(RowsLeftOut, "write", lambda quarantine: None)
    x = torch.randn(BAD_EVERY * 2 * ENOUGH, 4, generator=torch.Generator().manual_seed(0))
    x[::BAD_EVERY, 1] = float("nan")
    data = torch.utils.data.TensorDataset(x, x[:, :1].nan_to_num() * 0.0)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    policy = named("balanced")
    policy = replace(policy, budget=replace(policy.budget, window=40, rows=10**6, share=0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard(
        *(None, model, optimizer),
        data=data,
        batch_size=BATCH,
        steps=10**6,
        shuffle=False,
        recovery=policy,
        objective=lambda model, batch: mse_loss(model(batch[0]), batch[1]),
        run_dir=tmp_path,
    )
    costs: dict[range, list[int]] = {}
    batches = guard.batches()
    for part in (range(EARLY.start), EARLY, range(EARLY.stop, LATE.start), LATE):
        written, syncs = disk.written, disk.syncs
        with counted_lines() if part in (EARLY, LATE) else nullcontext([0]) as lines:
            while len(guard.incidents) < part.stop:
                guard.step(next(batches))
        costs[part] = [disk.written - written, disk.syncs - syncs, lines[0]]
    guard.close()
    for early, late in zip(costs[EARLY], costs[LATE], strict=True):
        assert late <= 1.3 * early, costs  # what grows with their number would be more than twice as much
    assert (tmp_path / "journal.jsonl").stat().st_size < 6_000 * ENOUGH
    assert len(read_story(tmp_path).chapters) == ENOUGH
    assert {one.outcome for one in guard.incidents[:75]} == {"recovered"}
