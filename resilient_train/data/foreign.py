"""Batches of a loader that is not ours."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch

from resilient_train.data.samples import Slicing, Update, WithoutIndex
from resilient_train.errors import TrainError


class _Served(NamedTuple):
    """An update that may have to be served again."""

    start: int
    stop: int
    batches: list[Any]  # in containers that nobody else has
    versions: list[int]  # of their tensors, as torch counts what is done to them in place

    def is_whole(self) -> bool:
        """Say whether its tensors are what they were."""
        return self.versions == _versions(self.batches)


class ForeignSamples(WithoutIndex):
    """Batches of somebody else's loader: it goes on where it is, whatever the run does.

    The last two updates are remembered and can be had once more; further back nothing can be fetched again, so after
    a rewind the run trains on what comes next. Positions count samples as if every batch were full.

    A loop may do with its batches what it likes. The containers it gets are its own, which costs nothing. Tensors are
    copied only once a loop was seen to change one in place: else a copy of every batch, out of pinned memory at that,
    would be the price for what hardly any loop does. What was changed before that is not served again.
    """

    def __init__(self, loader: Iterable[Any], slicing: Slicing) -> None:
        self.loader, self.slicing = loader, slicing
        self.position = 0
        self._gone = 0  # up to here, as positions were counted before a rewind, batches are used up
        self._batches: Iterator[Any] | None = None
        self._served = False
        self._recent: deque[_Served] = deque(maxlen=2)
        self._ahead: deque[_Served] = deque()
        self._changes_tensors = False  # whether the loop does, in place

    @property
    def next_start(self) -> int:
        return self.position

    def next_update(self) -> Update:
        again = self._ahead.popleft() if self._ahead else None
        latest = again or (self._recent[-1] if self._recent else None)
        is_whole = latest is None or latest.is_whole()
        self._changes_tensors |= not is_whole
        batches = again.batches if again is not None and is_whole else self._fetch()
        served = _Served(self.position, self.position + self.slicing.samples, batches, _versions(batches))
        self._recent.append(served)
        self.position = self._gone = served.stop
        leaf = _cloned if self._changes_tensors else _same
        return Update(served.start, served.stop, [_rebuilt(batch, leaf) for batch in batches])

    def go_back(self, update: Update) -> None:
        while self._recent and self._recent[-1].start >= update.start:
            self._ahead.appendleft(self._recent.pop())
        self.position = update.start

    def skip(self, start: int, stop: int) -> None:
        """Pass over what would be served again, and then over new batches.

        What was used up before a rewind does not come again and counts as passed over.
        """
        while self._ahead and start <= self._ahead[0].start < stop:
            self.position = self._ahead.popleft().stop
        at = max(self.position, self._gone)
        while not self._ahead and start <= at < stop:
            self._fetch()
            at += self.slicing.samples

    def slice_as(self, slicing: Slicing) -> bool:
        return False  # its batches are what they are

    def passed_over(self) -> list[tuple[int, int]]:
        return []  # what is gone does not come again

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self._recent.clear()
        self._ahead.clear()

    def close(self) -> None:
        self._batches = None

    def _fetch(self) -> list[Any]:
        return [self._next_batch() for _ in range(self.slicing.accumulation)]

    def _next_batch(self) -> Any:
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self.loader)
            try:
                batch = next(self._batches)
            except StopIteration:
                self._batches = None
            else:
                self._served = True
                return batch
        if self._served:
            raise TrainError("data: the loader has ended and cannot be iterated again: give one that can")
        raise TrainError("data: the loader is empty: it has no batches")


def _rebuilt(batch: Any, leaf: Callable[[Any], Any]) -> Any:
    """A batch in new containers, of whatever class, with every leaf as it is made."""
    if isinstance(batch, MutableMapping):
        return _refilled(batch, list(batch.items()), leaf)
    if isinstance(batch, list):
        return _refilled(batch, list(enumerate(batch)), leaf)
    if isinstance(batch, tuple):
        parts = [_rebuilt(part, leaf) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return leaf(batch)


def _refilled(batch: Any, items: list[tuple[Any, Any]], leaf: Callable[[Any], Any]) -> Any:
    rebuilt = copy.copy(batch)
    for key, part in items:
        if (new := _rebuilt(part, leaf)) is not part:
            rebuilt[key] = new
    return rebuilt


def _same(leaf: Any) -> Any:
    return leaf


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _versions(batches: list[Any]) -> list[int]:
    versions: list[int] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference():  # of those torch counts nothing
            versions.append(leaf._version)
        return leaf

    for batch in batches:
        _rebuilt(batch, note)
    return versions
