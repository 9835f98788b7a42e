"""Samples without an index: of an iterable data set, of a loader that the caller made, and of a function."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from inspect import isgeneratorfunction
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from resilient_train.data.fed import Fed, FedSamples
from resilient_train.data.rows import Collate, Retries, no_watchdog
from resilient_train.data.samples import Slicing, Update
from resilient_train.errors import StorageFailed, TrainError, in_one_line
from resilient_train.state.randomness import Purpose, mix, seed_all, seed_host
from resilient_train.state.tree import rebuilt, sha256

_log = logging.getLogger("resilient_train")

_BEAT_EVERY = 1_000  # rows that are only read to find a place
_COMPARED = 4  # first rows of a data set, and those after them, that are read twice before a run


class LoaderBatches:
    """The batches of the caller's loader, drawn one after the other.

    A loader may draw from the global generators, which rewind. So every batch is fetched with random numbers that are
    a function of the number of batches fetched before it, which never goes back. A resumed run draws what the run would
    have drawn; torchdata's `StatefulDataLoader` and the like, and loaders with numbered rows, continue at their place.
    """

    def __init__(self, loader: Any, slicing: Slicing, seed: int, device: torch.device) -> None:
        self.loader, self.slicing, self.seed, self.device = loader, slicing, seed, device
        self.beat: Callable[[], None] = no_watchdog
        self.drawn = 0
        self._batches: Iterator[Any] | None = None
        is_dataloader = isinstance(loader, DataLoader) and not hasattr(loader, "use_stateful_dataloader")
        self._stateful: Any = loader if is_dataloader and hasattr(loader, "load_state_dict") else None
        self._marks: deque[Any] = deque(maxlen=256)  # batches drawn before, and how it continues there

    def place(self, drawn: int) -> dict[str, Any]:
        """Return what it takes to continue behind so many batches."""
        if self._stateful is not None and drawn == self.drawn:
            self._marks.append((drawn, copy.deepcopy(self._stateful.state_dict())))
        before = [one for one in self._marks if one[0] <= drawn][-1:]
        return {"drawn": drawn, "loader": [[drawn - at, mark] for at, mark in before]}

    def go_to(self, place: dict[str, Any]) -> None:
        """Continue at a place of an earlier process."""
        self.drawn, self._batches = place["drawn"], None
        self._marks.clear()
        if place.get("loader"):
            self.continue_from(*place["loader"][0])
        elif self.drawn:
            _log.info("data: a loader without a state_dict begins again at its first batch, one that draws continues")

    def continue_from(self, behind: int, mark: Any) -> None:
        """Continue so many batches behind a mark."""
        self.drawn -= behind
        self._marks.append((self.drawn, mark))
        self._stateful.load_state_dict(copy.deepcopy(mark))
        for _ in range(behind):
            self._next_batch()

    def fetch(self) -> list[tuple[Any, Sequence[int]]]:
        """Fetch the micro-batches of the next update, with the indices of their rows if these are known."""
        return [(self._next_batch(), ()) for _ in range(self.slicing.accumulation)]

    def begun(self) -> Iterator[Any]:
        """Begin an epoch, with the random numbers that belong to its first batch."""
        return iter(self.loader() if isgeneratorfunction(self.loader) else self.loader)

    def seed_for(self, batch: int) -> None:
        seed_all(mix(Purpose.LOADER, self.seed, batch, self.slicing.rank), self.device)

    def _next_batch(self) -> Any:
        self.seed_for(self.drawn)
        self.drawn += 1
        retries, failed, ends = Retries(self.beat), "", 0
        while ends < 2:
            try:
                if self._batches is None:
                    self._batches = self.begun()
                return next(self._batches)
            except StopIteration:
                self._batches, ends = None, ends + 1
            except Exception as error:  # most loaders continue after it; a generator has ended, and is iterated again
                failed = in_one_line(error)
                retries.pause_or_raise(error, "fetching a batch of the loader")
        if failed:
            raise StorageFailed("a batch of the loader could not be fetched, and it cannot be iterated again", failed)
        raise TrainError("data: the loader is empty, or it has ended and cannot be iterated again: give one that can")


class LoaderSamples(FedSamples):
    """Updates of the caller's loader, kept as long as a rewind may go back to them.

    Positions count samples as if every batch were full. What is kept is a copy: a loop may change its batches, and a
    loader may use their memory again.
    """

    is_fed = False

    def __init__(self, source: LoaderBatches, **more: Any) -> None:
        super().__init__(source.slicing, **more)
        self.loader, self._source = source.loader, source

    @property
    def next_start(self) -> int:
        return next((fed.start for fed in self._ahead()), self.skipped.end_at(self.newest_stop))

    def next_update(self, beat: Callable[[], None] = no_watchdog) -> Update:
        self._source.beat = beat
        while not self.is_behind:
            self._fetch()
        return super().next_update(beat)

    def handed_out(self, fed: Fed) -> list[Any]:
        kept, fresh = fed.more.pop("fresh", (None, []))
        return fresh if kept is fed.batches else [rebuilt(batch, _copied) for batch in fed.batches or ()]

    def starts(self, after: int, samples: int) -> list[int]:
        while self.slicing.world == 1 and self.newest_stop <= after + samples:  # else other ranks have to fetch, too
            self._fetch()
        return super().starts(after, samples)

    def state_dict(self) -> dict[str, Any]:
        ahead = next(self._ahead(), None)
        return {"position": self.position, **self._source.place(self._source.drawn if ahead is None else ahead.number)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kept = next((fed.start for fed in self._fed if fed.batches is not None or fed.rows), self.newest_stop)
        is_kept = state["position"] >= -self._least(-kept)
        if (self._fed or self._older) and (is_kept or not state["loader"]):
            super().load_state_dict(state)
            return
        self._forget_all()  # the state is of an earlier process, or from before what is kept
        self.position = self.newest_stop = state["position"]
        self._source.go_to(state)

    def close(self) -> None:
        super().close()
        self._source._batches = None

    def _fetch(self) -> None:
        drawn = self._source.drawn
        made = [self.healthy(batch, rows) for batch, rows in self._source.fetch()]
        kept = [rebuilt(batch, _copied) for batch, _ in made]
        fed = self.feed(kept, [rows for _, rows in made])
        fed.number, fed.more["fresh"] = drawn, (kept, [rebuilt(batch, lambda leaf: leaf) for batch, _ in made])


class RowStream(LoaderBatches):
    """The rows of an iterable data set, epoch after epoch, each with the random numbers that belong to it.

    Every rank reads all of them and keeps its own share: so a run on 1, 2 or 4 processes sees the same updates. What
    `LoaderBatches` does with the batches of a loader is done here with rows.
    """

    def __init__(self, dataset: Any, slicing: Slicing, seed: int) -> None:
        """Begin at the first row. Raises ValueError if the data set does not repeat itself."""
        super().__init__(dataset, slicing, seed, torch.device("cpu"))
        self._stateful, self._pristine = self, copy.deepcopy(dataset.state_dict())
        self._begin(0, 0, self._pristine)
        self._is_exact = self._repeats()
        self._begin(0, 0, self._pristine)
        self._marks.append((0, {"epoch": 0, "row": 0, "dataset": None}))

    def state_dict(self) -> dict[str, Any]:
        state = self.loader.state_dict() if self._is_exact else None
        return {"epoch": self._epoch, "row": self._row, "dataset": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        epoch, row = state["epoch"], state["row"]
        if state["dataset"] is not None:
            self._begin(epoch, row, state["dataset"])
            return
        self._begin(epoch, 0, self._pristine)
        for number in range(row):
            self._next_row()
            if number % _BEAT_EVERY == 0:
                self.beat()

    def fetch(self) -> list[tuple[Any, Sequence[int]]]:
        """Fetch the rows of the next update, over all ranks and micro-batches."""
        return [([self._next_batch() for _ in range(self.slicing.samples)], ())]

    def _next_batch(self) -> Any:
        """Read one row. If that fails for a moment, the epoch is read again: an iterator that has raised has ended."""
        self.drawn += 1
        retries, place = Retries(self.beat), {"epoch": self._epoch, "row": self._row, "dataset": None}
        while True:
            try:
                if retries.pauses:
                    self.load_state_dict(place)
                return self._next_row()
            except Exception as error:
                retries.pause_or_raise(error, f"reading row {place['row']} of epoch {place['epoch']}")

    def _next_row(self) -> Any:
        assert self._batches is not None
        while True:
            seed_host(mix(Purpose.ROW, self.seed, self._epoch, self._row))
            try:
                row = next(self._batches)
            except StopIteration:
                if self._row == 0:
                    raise TrainError("data: the iterable data set has no rows any more") from None
                self._begin(self._epoch + 1, 0, self._pristine)
            else:
                self._row += 1
                return row

    def _begin(self, epoch: int, row: int, state: Any) -> None:
        """Continue at a row, at which the data set has this state."""
        self._epoch, self._row = epoch, row
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)
        self.loader.load_state_dict(copy.deepcopy(state))
        seed_host(mix(Purpose.ROW, self.seed, epoch, row))  # some data sets fetch their first row in iter()
        self._batches = iter(self.loader)

    def _digests(self) -> list[str]:
        """Read a few rows of the first epoch; there may be fewer."""
        assert self._batches is not None
        digests = []
        for number in range(self._row, self._row + _COMPARED):
            seed_host(mix(Purpose.ROW, self.seed, 0, number))
            digests += [sha256(row) for row in islice(self._batches, 1)]
        self._row += len(digests)
        return digests

    def _repeats(self) -> bool:
        """Say whether the data set continues at a state with the rows that followed it.

        Some states leave out what a shuffle buffer holds. Then a place is found by reading its epoch from the start.
        """
        first = self._digests()
        if not first:
            raise ValueError("the iterable data set is empty: it has no rows")
        state, row = copy.deepcopy(self.loader.state_dict()), self._row
        later = self._digests()
        self._begin(0, 0, self._pristine)
        if self._digests() != first:
            raise ValueError("gives other rows after load_state_dict than before, so a run over it cannot be repeated")
        self._begin(0, row, state)
        is_exact = self._digests() == later
        if not is_exact:
            kind = type(self.loader).__name__
            _log.info("data: the state of this %s forgets rows (shuffle buffer?): a resume reads an epoch again", kind)
        return is_exact


class IterableSamples(LoaderSamples):
    """Samples of an iterable data set that can return its position and go back to it."""

    def __init__(
        self,
        dataset: Any,
        slicing: Slicing,
        *,
        seed: int,
        collate: Collate,
        least: Callable[[float], float] = lambda number: number,
    ) -> None:
        """Raises ValueError if the data set does not repeat itself."""
        super().__init__(RowStream(dataset, slicing, seed), least=least)
        self.seed, self.collate = seed, collate

    def handed_out(self, fed: Fed) -> list[Any]:
        """Make this rank's batches of the rows; of copies, as a collate function may change them."""
        batches, (rows,) = [], fed.batches or ([],)
        for number, some in enumerate(self.slicing.of_this_rank(rows)):
            place = number * self.slicing.world + self.slicing.rank  # among the micro-batches on all ranks
            seed_host(mix(Purpose.COLLATE, self.seed, fed.start, place))
            batches.append(self.collate([rebuilt(row, _copied) for row in some]))
        if not fed.nbytes:  # rows of objects: their tensors tell what they take
            self.keep(fed, batches)
        return batches

    def slice_as(self, slicing: Slicing) -> bool:
        self.slicing = self._source.slicing = slicing
        return True

    def _fetch(self) -> None:
        drawn = self._source.drawn
        self.feed([rows for rows, _ in self._source.fetch()]).number = drawn


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf.clone() if torch.is_tensor(leaf) else leaf
