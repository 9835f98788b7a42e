"""Loaders of a user's own that draw from the global generators, as nanoGPT's get_batch does."""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from group import alone
from guarded import REWIND, guard_over, mse
from kills import die_with_checkpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from resilient_train.data.trees import weights_sha256
from resilient_train.ground.reader import DiskConfig

DATA = torch.randn(512, 6, generator=torch.Generator().manual_seed(3))
DRAWS: dict[str, Callable[[], Tensor]] = {
    "torch": lambda: torch.randint(len(DATA), (16,)),
    "numpy": lambda: torch.from_numpy(np.random.randint(0, len(DATA), 16)),
    "python": lambda: torch.tensor([random.randrange(len(DATA)) for _ in range(16)]),
}


pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def batches(draw: Callable[[], Tensor]) -> Iterator[list[Tensor]]:
    while True:
        rows = draw()
        yield [DATA[rows], DATA[rows].sum(1, keepdim=True), rows]


@pytest.mark.parametrize("form", ["objective", "hand-over"])
@pytest.mark.parametrize("source", DRAWS)
def test_batches_that_a_loader_drew_come_again_after_a_rewind(source: str, form: str) -> None:
    """As they were, also the one that the loop has spoiled. The loader draws none of them a second time."""
    drawn = []

    def draw() -> Tensor:
        rows = DRAWS[source]()
        drawn.append(tuple(rows.tolist()))
        return rows

    guard = guard_over(batches(draw), objective=mse if form == "objective" else None, recovery=REWIND)
    model, trained, spoiled = guard.model, list[Any](), False
    for batch in guard.batches(30):
        trained.append(batch[0].clone())
        if guard.clock.tick == 20 and not spoiled:
            spoiled = True
            batch[0].mul_(float("nan"))
        if form == "objective":
            guard.step(batch)
        else:
            loss = mse(model, batch)
            guard.world.accelerator.backward(loss)
            guard.update(loss)
    assert [one.rewound_to for one in guard.incidents] == [10]
    assert len(set(drawn)) == len(drawn) == 30
    assert all(map(torch.equal, trained[-20:], trained[10:20]))


class Rows(Dataset[Any]):
    """Some are NaN, or raise."""

    def __init__(self, bad: tuple[int, ...] = (), *, raises: bool = False) -> None:
        self.bad, self.raises = bad, raises

    def __len__(self) -> int:
        return 203

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor, int]:
        if self.raises and row in self.bad:
            raise ValueError("cannot be decoded")
        x = DATA[row] * (math.nan if row in self.bad else 1.0)
        return x, DATA[row].sum(0, keepdim=True), row


def over_rows(run_dir: Path, kind: str, workers: int, killed_at: int = 0, bad: tuple[int, ...] = ()) -> Any:
    """Train over a loader. Returns the weights, the rows of all batches that were handed out, and those accused."""
    draws = torch.Generator().manual_seed(5) if kind == "generator" else None
    rows = Rows(bad, raises=kind == "raises")
    loader: Any = DataLoader(rows, 16, True, num_workers=workers, persistent_workers=workers > 0, generator=draws)
    if kind == "weighted":
        loader = DataLoader(rows, 16, sampler=WeightedRandomSampler([1.0, 2.0, *[1.0] * 201], 203), drop_last=True)
    if kind == "drawn":
        loader = batches(DRAWS["torch"])
    if kind == "prepared":
        loader = Accelerator(cpu=True).prepare(loader)
    guard = guard_over(loader, run_dir=run_dir, disk=DiskConfig(every=6), resume=True, steps=50)
    seen = []
    for batch in guard.batches():
        seen.append(tuple(batch[2].tolist()))
        if guard.clock.step == killed_at > 0:
            die_with_checkpoint(run_dir)
        loss = mse(guard.model, batch)
        guard.world.accelerator.backward(loss)
        guard.update(loss)
    guard.close()
    rows.raises = False
    assert type(next(iter(loader))) is list, "the caller's own loader has changed"
    return weights_sha256(guard.state), seen, [one.diagnosis.rows for one in guard.incidents]


@pytest.mark.parametrize(("kind", "workers"), [("plain", 2), ("generator", 0), ("prepared", 0), ("drawn", 0)])
def test_a_loader_goes_on_where_it_was(kind: str, workers: int, tmp_path: Path) -> None:
    """After a kill in its third epoch, too: the same rows, and the weights of a run that was not killed."""
    weights, seen, _ = over_rows(tmp_path / "unharmed", kind, workers)
    assert alone(over_rows, tmp_path / "mine", kind, workers, 31) == (-signal.SIGKILL, None)
    resumed, rest, _ = over_rows(tmp_path / "mine", kind, workers)
    assert 0 < len(rest) < 50
    assert (resumed, rest) == (weights, seen[-len(rest) :])


def test_a_loader_with_a_generator_yields_the_batches_of_a_plain_loop(tmp_path: Path) -> None:
    _, seen, _ = over_rows(tmp_path, "generator", 0)
    plain = DataLoader(Rows(), 16, True, generator=torch.Generator().manual_seed(5))
    expected = [tuple(batch[2].tolist()) for _ in range(4) for batch in plain]
    assert seen == expected[:50]


@pytest.mark.parametrize(
    ("kind", "workers", "times"),
    [("plain", 0, 2), ("prepared", 0, 2), ("weighted", 0, 2), ("raises", 0, 0), ("raises", 1, 0)],
)
def test_bad_rows_of_a_loader_are_named_and_come_no_more(kind: str, workers: int, times: int, tmp_path: Path) -> None:
    _, seen, accused = over_rows(tmp_path, kind, workers, bad=(17, 99))
    assert sorted(accused) == [(17,), (99,)]
    assert len({rows for rows in seen if {17, 99} & {*rows}}) == times  # one may come twice
