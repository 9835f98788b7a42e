"""Batches of a loader that is not ours."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch

from resilient_train.data.patience import Patience, unwatched
from resilient_train.data.samples import Slicing, Update, WithoutIndex
from resilient_train.data.stream import Ranges
from resilient_train.errors import StorageFailed, TrainError, in_one_line
from resilient_train.state.randomness import Purpose, mix, preserved, seed_all


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

    A loader may draw from the global generators, which rewind. So every batch is fetched with random numbers that are
    a function of how many were fetched before it, which never goes back and is continued by a resume: no batch comes
    again because the run went back, and a resume draws what the run would have drawn.

    A loop may do with its batches what it likes. The containers it gets are its own, which costs nothing. Tensors are
    copied only once a loop was seen to change one in place: else a copy of every batch, out of pinned memory at that,
    would be the price for what hardly any loop does. What was changed before that is not served again.
    """

    def __init__(
        self, loader: Iterable[Any], slicing: Slicing, *, seed: int = 0, device: torch.device | None = None
    ) -> None:
        self.loader, self.slicing, self.seed, self.device = loader, slicing, seed, device or torch.device("cpu")
        self.position = 0
        self._drawn = 0  # batches, by this run
        self._skipped = Ranges()  # that the run had not reached yet
        self._beat: Callable[[], None] = unwatched
        self._gone = 0  # up to here, as positions were counted before a rewind, batches are used up
        self._batches: Iterator[Any] | None = None
        self._served = False
        self._recent: deque[_Served] = deque(maxlen=2)
        self._ahead: deque[_Served] = deque()
        self._changes_tensors = False  # whether the loop does, in place

    @property
    def next_start(self) -> int:
        return self.position if self._ahead else self._skipped.end_at(self.position)

    def next_update(self, beat: Callable[[], None] = unwatched) -> Update:
        self._beat = beat
        while self.position < self.next_start:
            self._fetch()
            self.position += self.slicing.samples
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

        What was used up before a rewind does not come again and counts as passed over. What lies ahead, as after a
        resume, is passed over when it comes.
        """
        while self._ahead and start <= self._ahead[0].start < stop:
            self.position = self._ahead.popleft().stop
        at = max(self.position, self._gone)
        if at == self.position <= start:
            self._skipped.add(start, stop)
            return
        with preserved(self.device):
            while not self._ahead and start <= at < stop:
                self._fetch()
                at += self.slicing.samples

    def slice_as(self, slicing: Slicing) -> bool:
        return False  # its batches are what they are

    def passed_over(self) -> list[tuple[int, int]]:
        return list(self._skipped)  # the others are gone and do not come again

    def state_dict(self) -> dict[str, Any]:
        ahead = len(self._ahead) * self.slicing.accumulation  # another process has to draw them once more
        return {"position": self.position, "drawn": self._drawn - ahead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self._drawn = max(self._drawn, state.get("drawn", 0))  # earlier versions wrote none
        self._recent.clear()
        self._ahead.clear()

    def close(self) -> None:
        self._batches = None

    def _fetch(self) -> list[Any]:
        return [self._next_batch() for _ in range(self.slicing.accumulation)]

    def _next_batch(self) -> Any:
        seed_all(mix(Purpose.LOADER, self.seed, self._drawn, self.slicing.rank), self.device)
        self._drawn += 1
        patience, failed = Patience(self._beat), ""
        ends = 0
        while ends < 2:
            try:
                if self._batches is None:
                    self._batches = iter(self.loader)
                batch = next(self._batches)
            except StopIteration:
                self._batches, ends = None, ends + 1
            except Exception as error:  # most loaders go on behind it; a generator has ended, and is iterated again
                failed = in_one_line(error)
                if not patience.waits(error, "a batch of the loader"):
                    if patience.pauses:
                        raise StorageFailed("a batch of the loader could not be fetched", failed) from error
                    raise
            else:
                self._served = True
                return batch
        if failed:
            raise StorageFailed("a batch of the loader could not be fetched, and it cannot be iterated again", failed)
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
