"""Rows that come out the same every time they are fetched, random numbers included."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset, default_collate

from resilient_train.core.randomness import Purpose, mix, seed_host
from resilient_train.data.stream import Key, Stream
from resilient_train.data.trees import rebuilt
from resilient_train.ground.errors import StorageFailed, in_one_line
from resilient_train.ground.wording import log

PAUSES_S = (0.1, 0.3, 1.0, 2.0, 4.0)  # before each retry of an update, not of each of its rows
# A retry would fail the same way.
_LASTING = FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError
_SUBSTITUTES = 5  # that are tried; after that the data set, or the collate function, is broken as a whole
_STORM = 4  # rows of a micro-batch that the storage fails to return; if they are a quarter of it, no row is bad


def may_pass(error: BaseException | None) -> bool:
    """Say whether an error, or its cause, is one of storage or of a connection, and may not come again.

    Libraries' own are known by name. An OSError without a number (a truncated picture) is about content.
    """
    while error is not None:
        if any("Timeout" in kind.__name__ or "Connection" in kind.__name__ for kind in type(error).__mro__):
            return True
        if isinstance(error, OSError) and error.errno and not isinstance(error, _LASTING):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


class Retries:
    def __init__(self) -> None:
        self.pauses = 0

    def pause(self, error: BaseException, what: str) -> bool:
        """Pause before a retry; return False if a retry cannot help, or none is left."""
        if self.pauses == len(PAUSES_S) or not may_pass(error):
            return False
        pause = PAUSES_S[self.pauses]
        log.warning("data: %s failed (%s): tried again in %g s", what, in_one_line(error), pause)
        time.sleep(pause)
        self.pauses += 1
        return True

    def pause_or_raise(self, error: Exception, what: str) -> None:
        """Pause before a retry; raise where none helps: StorageFailed after others have failed."""
        if not self.pause(error, what):
            raise StorageFailed(f"{what} failed", in_one_line(error)) if self.pauses else error


class FailedRow(NamedTuple):
    row: int
    error: str  # in one line, with the place in the user's code


Made = tuple[Any, Sequence[Key], Sequence[FailedRow]]  # a micro-batch, the keys of its rows, and rows that failed


def with_substitutes(keys: Sequence[Key], stream: Stream, rows: RepeatableBatches, retries: Retries) -> Made:
    """Make a micro-batch, with another for rows that raise when they are fetched again, too; raise if none helps."""
    try:
        return rows.collated(keys), keys, ()
    except Exception:
        fetched, raised = _fetched_again(keys, rows, retries)
        if not raised:
            with suppress(Exception):
                return rows.of_rows([rebuilt(fetched[key]) for key in keys], keys), keys, ()
        of_storage = [error for error in raised.values() if may_pass(error)]
        is_of_rows = len(of_storage) < max(_STORM, len(keys) / 4)
        for other in stream.others([keys[0]] * _SUBSTITUTES, 0, without=raised) if is_of_rows else ():
            added, failed = _fetched_again([other], rows, retries)
            if not failed:
                with suppress(Exception):
                    return _without_bad_rows(keys, raised, other, fetched | added, rows)
        if of_storage:
            what = f"{len(of_storage)} of {len(keys)} rows of a batch could not be fetched"
            raise StorageFailed(what, in_one_line(of_storage[0])) from of_storage[0]
        raise


def _fetched_again(
    keys: Sequence[Key], rows: RepeatableBatches, retries: Retries
) -> tuple[dict[Key, Any], dict[int, Exception]]:
    """Fetch rows one by one, with retries. Returns the fetched rows, and the errors of the others by row."""
    fetched: dict[Key, Any] = {}
    while True:
        raised: dict[int, Exception] = {}
        for key in keys:
            if key not in fetched:
                try:
                    fetched[key] = rows.fetch(key)
                except Exception as error:
                    raised[key.row] = error
        passing = next((error for error in raised.values() if may_pass(error)), None)
        if passing is None or not retries.pause(passing, f"{len(raised)} of {len(keys)} rows"):
            return fetched, raised


def _without_bad_rows(
    keys: Sequence[Key],
    raised: Mapping[int, Exception],
    other: Key,
    fetched: Mapping[Key, Any],
    rows: RepeatableBatches,
) -> Made:
    """Make the batch with `other` for rows that raised, or do not collate next to it; raise if it does not help."""

    def made(some: Sequence[Key]) -> Any:
        return rows.of_rows([rebuilt(fetched[key]) for key in some], some)  # a collate function may change rows

    bad = dict(raised)
    for key in keys:
        if key.row not in bad:
            try:
                made([other, key])
            except Exception as error:
                bad[key.row] = error
    if len(bad) - len(raised) > max(1, (len(keys) - 1) // 2):
        raise ValueError("the other row is odd itself, or two rows never collate")
    mixed = [other if key.row in bad else key for key in keys]
    return made(mixed), mixed, [FailedRow(row, in_one_line(why)) for row, why in bad.items()]


Collate = Callable[[list[Any]], Any]


class RepeatableBatches:
    """Fetches and collates the rows of one micro-batch, each with the random numbers that belong to it.

    Seeding for every row costs more than many a row: rows are fetched without it until a batch draws numbers, which is
    fetched again. The process's generators are left in any state: each update seeds them afterwards.
    """

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset, self.collate = dataset, collate
        self._draws = False  # as far as is known
        self._first: Any = None  # numbers after the seed of a batch that draws none

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        """Return a list of one batch: torch's fetcher asks for a list of rows and collates it."""
        return [self.collated(keys)]

    def collated(self, keys: Sequence[Key]) -> Any:
        parts = self.dataset.tensors if type(self.dataset) is TensorDataset and self.collate is default_collate else ()
        if parts and all(one.layout is torch.strided and one.is_cpu for one in parts):
            rows = torch.tensor([key.row for key in keys])  # all at once takes a tenth of the time, and draws nothing
            return [one.index_select(0, rows) for one in parts]
        if not self._draws:
            seed = mix(Purpose.PROBE)
            if self._first is None:
                seed_host(seed)
                self._first = _next_numbers()
            seed_host(seed)
            batch = self.collate(self.plain([key.row for key in keys]))
            if _next_numbers() == self._first:
                return batch
            self._draws = True
        return self.of_rows([self.fetch(key) for key in keys], keys)

    def of_rows(self, rows: list[Any], keys: Sequence[Key]) -> Any:
        seed_host(mix(Purpose.COLLATE, *keys[0]))
        return self.collate(rows)

    def fetch(self, key: Key) -> Any:
        """Fetch one row, in the way in which a batch is fetched."""
        seed_host(mix(Purpose.ROW, *key))
        return self.dataset[key.row] if self._draws else self.plain([key.row])[0]

    def plain(self, rows: Sequence[Any]) -> list[Any]:
        fetch_many = getattr(self.dataset, "__getitems__", None)
        return list(fetch_many(rows)) if fetch_many else [self.dataset[row] for row in rows]


def _next_numbers() -> tuple[float, float, float]:
    return random.random(), np.random.random(), float(torch.rand((), device="cpu"))
