"""Batches of a loader that is not ours."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from resilient_train.data.samples import Slicing, Update
from resilient_train.errors import TrainError


class ForeignSamples:
    """Batches of somebody else's loader: it goes on where it is, whatever the run does.

    The last two updates are remembered and can be had once more; further back nothing can be fetched again, so after
    a rewind the run trains on what comes next. Positions count samples as if every batch were full.
    """

    def __init__(self, loader: Iterable[Any], slicing: Slicing) -> None:
        self.loader, self.slicing = loader, slicing
        self.position = 0
        self._gone = 0  # up to here, as positions were counted before a rewind, batches are used up
        self._batches: Iterator[Any] | None = None
        self._served = False
        self._recent: deque[Update] = deque(maxlen=2)
        self._ahead: deque[Update] = deque()

    def next_update(self) -> Update:
        batches = self._ahead.popleft().batches if self._ahead else self._fetch()
        update = Update(self.position, self.position + self.slicing.samples, batches)
        self._recent.append(update)
        self.position = self._gone = update.stop
        return update

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
