"""Data that cannot be read for a moment, or for good: what is waited for, and that no row is blamed for it."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import accused, guard_over, mse
from guarded import trained as train
from tables import table
from torch import Tensor
from torch.utils.data import DataLoader

from resilient_train import Guard
from resilient_train.data.trees import weights_sha256
from resilient_train.ground.errors import TrainError
from resilient_train.ground.reader import DiskConfig
from resilient_train.ground.wording import say

STEPS, BATCH = 40, 16
INPUTS = torch.randn(200, 6, generator=torch.Generator().manual_seed(3))


pytestmark = pytest.mark.usefixtures("fresh_accelerate")


class Rows:
    """Rows on a storage that fails as `fails`, asked with each row, says: an error, or none."""

    def __init__(self, fails: Callable[[int], Exception | None] = lambda row: None) -> None:
        self.fails = fails

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        if (error := self.fails(row)) is not None:
            raise error
        return INPUTS[row], INPUTS[row].sum().reshape(1)


class Stream:
    """The same rows in order, from a place that a state holds."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.at = rows, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.rows):
            row = self.rows[self.at]
            self.at += 1
            yield row

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def as_it_is(rows: Rows) -> Rows:
    return rows


def io_error() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


class Away:
    """All rows fail for a third of a second, from the `first` fetch on."""

    def __init__(self, first: int) -> None:
        self.left, self.until = first, 0.0

    def __call__(self, row: int) -> Exception | None:
        self.left -= 1
        if self.left == 0:
            self.until = time.monotonic() + 0.35
        return io_error() if self.left <= 0 and time.monotonic() < self.until else None


class Now:
    """Every 7th fetch fails, whatever row it is of."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, row: int) -> Exception | None:
        self.count += 1
        return io_error() if self.count % 7 == 0 else None


def trained(data: Any, **given: Any) -> Guard:
    own_size = {"batch_size": None} if isinstance(data, DataLoader) else {}
    with closing(guard_over(data, objective=mse, **own_size, **given)) as guard:
        return train(guard, STEPS)


@cache
def unharmed(kind: Callable[[Rows], Any]) -> str:
    """The weights of a run whose storage never failed."""
    return weights_sha256(trained(kind(Rows())).state)


def loader(rows: Rows) -> Any:
    return DataLoader(rows, batch_size=BATCH)  # type: ignore[arg-type]


@table(
    ("kind", "fails", "workers"),
    {
        "away": (as_it_is, lambda: Away(100), 0),
        "away from workers": (as_it_is, lambda: Away(100), 2),
        "now and then": (as_it_is, Now, 0),
        "a stream, which has ended with the error": (Stream, lambda: Away(100), 0),
        "a loader": (loader, lambda: Away(100), 0),
    },
)
def test_what_fails_for_a_moment_costs_nothing(
    kind: Callable[[Rows], Any], fails: Callable[[], Any], workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No row is blamed, and the weights are those of a run whose storage never failed.

    A loader of one's own goes on with its next batch: what it has failed to give does not come again.
    """
    with caplog.at_level(logging.WARNING, "resilient_train"):
        guard = trained(kind(Rows(fails())), num_workers=workers)
    assert (guard.clock.step, guard.incidents) == (STEPS, [])
    assert kind is loader or weights_sha256(guard.state) == unharmed(kind)
    assert "Input/output error" in caplog.text, "not a word of it"


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_a_storage_that_fails_for_good_ends_the_run_in_words(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With code 1 and no row in quarantine; where it can be read again, the run resumes, and loses nothing."""
    monkeypatch.setattr("resilient_train.data.rows.PAUSES_S", (0.01, 0.02))
    fetches = count()

    def fails(row: int) -> Exception | None:
        return io_error() if next(fetches) > 400 and row % 100 < 100 * share else None

    kept: dict[str, Any] = {"run_dir": tmp_path / "run", "disk": DiskConfig(every=1000), "resume": True, "steps": STEPS}
    with pytest.raises(TrainError, match="the storage of the data fails") as failed:
        trained(Rows(fails), **kept)
    assert failed.value.exit_code == 1
    assert not (tmp_path / "run" / "quarantine.json").exists()
    guard, steps = guard_over(Rows(), objective=mse, **kept), list[int]()
    for batch in guard.batches():
        steps.append(guard.clock.step)
        guard.step(batch)
    guard.close()
    assert steps[0] == 20, "the newest proven state was on disk"
    assert (guard.incidents, weights_sha256(guard.state)) == ([], unharmed(as_it_is))


def test_rows_that_always_raise_are_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """A row that cannot be parsed, or whose file is missing, raises again at once."""

    def fails(row: int) -> Exception | None:
        return {17: ValueError("not a number"), 90: FileNotFoundError(errno.ENOENT, "none")}.get(row)

    guard = trained(Rows(fails))
    assert accused(guard.incidents) == [17, 90]
    assert {one.anomaly.signal for one in guard.incidents} == {"exception"}
    assert f"{__file__}:" in say(guard.incidents[0].diagnosis.advice)
    assert "tried again in" not in caplog.text
