"""Samples without an index: of an iterable data set, of a loader that the caller made, and of a function."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from inspect import isgeneratorfunction
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from resilient_train.data.fed import Fed, FedSamples
from resilient_train.data.rows import Collate, Retries, no_watchdog
from resilient_train.data.samples import Samples, Slicing, Update
from resilient_train.data.stream import Ranges
from resilient_train.errors import StorageFailed, TrainError, in_one_line
from resilient_train.state.randomness import Purpose, mix, seed_all, seed_host
from resilient_train.state.tree import rebuilt, sha256

_log = logging.getLogger("resilient_train")

_BEAT_EVERY = 1_000  # rows that are only read to find a place
_COMPARED = 4  # first rows of an update; with the last one they show whether the same place was found again
_REMEMBERED = 10_000  # updates whose digests are kept: further back than any rewind


class _Read(NamedTuple):
    """The rows of one update over all ranks, and where they were read."""

    place: int  # the position where reading began, at this row of this epoch
    epoch: int
    row: int
    start: int  # the position of the first sample that was not skipped
    stop: int
    rows: list[Any]


class IterableSamples(Samples):
    """Samples of an iterable data set that can return its position and go back to it.

    Every rank reads the whole stream and keeps its own share: so a run on 1, 2 or 4 processes sees the same updates.
    """

    def __init__(self, dataset: Any, slicing: Slicing, *, seed: int, collate: Collate) -> None:
        """Begin at the first row. Raises ValueError if the data set does not repeat itself."""
        self.dataset, self.slicing, self.seed, self.collate = dataset, slicing, seed, collate
        self.position = 0
        self.skipped = Ranges()
        self._pristine = copy.deepcopy(dataset.state_dict())
        self._state_is_exact = True  # until a rewind shows otherwise
        self._first_rows: dict[tuple[int, int], str] = {}  # digests by place and samples of an update
        self._pledge: dict[str, Any] | None = None  # the newest state of the data set whose rows were not read yet
        self._proof: dict[str, Any] | None = None  # the newest one within an epoch, with the digest of its rows
        self._recent: deque[_Read] = deque(maxlen=2)
        self._ahead: deque[_Read] = deque()  # the next updates, if they were read before
        self._read_to(0, 0)
        self._require_repetition()

    @property
    def next_start(self) -> int:
        return self._ahead[0].start if self._ahead else self.skipped.end_at(self.position)

    def next_update(self, beat: Callable[[], None] = no_watchdog) -> Update:
        self.beat = beat
        read = self._ahead.popleft() if self._ahead else self._read_update(Retries(beat))
        self._recent.append(read)
        start, self.position = read.start, read.stop
        batches = []
        for number, batch in enumerate(self.slicing.of_this_rank(read.rows)):
            place = number * self.slicing.world + self.slicing.rank  # among the update's micro-batches on all ranks
            seed_host(mix(Purpose.COLLATE, self.seed, start, place))
            batches.append(self.collate(list(batch)))
        return Update(start, self.position, batches)

    def go_back(self, update: Update) -> None:
        """Move back to an update that is still in memory: to find its place in the data set might take an epoch."""
        while self._recent and self._recent[-1].start >= update.start:
            self._ahead.appendleft(self._recent.pop())
            self.position = self._ahead[0].place

    def skip(self, start: int, stop: int) -> None:
        self.skipped.add(start, stop)
        while self._ahead and start <= self._ahead[0].start < stop:
            self.position = self._ahead.popleft().stop

    def slice_as(self, slicing: Slicing) -> bool:
        self.slicing = slicing
        return True

    def state_dict(self) -> dict[str, Any]:
        if self._ahead:  # the data set itself was read further
            ahead = self._ahead[0]
            return {"position": ahead.place, "epoch": ahead.epoch, "row": ahead.row, "dataset": None}
        if not self._state_is_exact:
            return {"position": self.position, "epoch": self._epoch, "row": self._row, "dataset": None}
        state = {"epoch": self._epoch, "row": self._row, "dataset": copy.deepcopy(self.dataset.state_dict())}
        self._pledge = state if self._row else None  # at the first row of an epoch it would prove nothing
        return {"position": self.position, **state, "proof": self._proof}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent.clear()
        self._ahead.clear()
        self.position = state["position"]
        self._pledge = None
        if self._state_is_exact and state["dataset"] is not None and self._is_proven(state.get("proof")):
            self._begin(state["epoch"], state["row"], state["dataset"])
        else:
            self._read_to(state["epoch"], state["row"])

    def _is_proven(self, proof: dict[str, Any] | None) -> bool:
        """Say whether the states of the data set can be used in place of reading an epoch from its first row.

        They can if the rows that follow will be compared with those read before, or, in another process, if an earlier
        state of the run leads to the rows that were read after it.
        """
        if (self.position, self.slicing.samples) in self._first_rows:
            return True
        if proof is None:
            return False
        try:
            self._begin(proof["epoch"], proof["row"], proof["dataset"])
            is_same: bool = _digest([self._next_row() for _ in range(proof["rows"])]) == proof["digest"]
            why = "it leads to other rows"
        except Exception as error:
            is_same, why = False, in_one_line(error)
        self._proof = proof if is_same else None
        if not is_same:
            kind = type(self.dataset).__name__
            _log.warning("the state of this %s cannot be used (%s): its epoch is read again", kind, why)
        return is_same

    def close(self) -> None:
        del self._rows

    def _read_update(self, retries: Retries) -> _Read:
        place, epoch, row = self.position, self._epoch, self._row
        positions = [at for span in self.skipped.outside(place, self.slicing.samples) for at in range(*span)]
        stop = positions[-1] + 1
        rows = self._read(epoch, row, stop - place, retries)
        count = self.slicing.samples  # more rows are read if a range is skipped, perhaps only since a rewind to here
        digest = _digest(rows[:count])
        if self._pledge is not None and (self._pledge["epoch"], self._pledge["row"]) == (epoch, row):
            self._proof = {**self._pledge, "rows": count, "digest": digest}
        self._pledge = None
        known = self._first_rows.setdefault((place, count), digest)
        if known != digest:
            # Some states leave out what a shuffle buffer holds: after a rewind its rows would be missing, without any
            # error. From now on a rewind starts at the beginning of its epoch and reads again.
            self._state_is_exact, self._proof = False, None
            kind = type(self.dataset).__name__
            _log.warning("the state of this %s forgets rows (shuffle buffer?): a rewind reads their epoch again", kind)
            self._read_to(epoch, row)
            rows = [self._next_row() for _ in rows]
            if _digest(rows[:count]) != known:
                raise TrainError(f"data: this {kind} gives other rows when it is read again")
        if len(self._first_rows) > _REMEMBERED:
            del self._first_rows[next(iter(self._first_rows))]
        return _Read(place, epoch, row, positions[0], stop, [rows[at - place] for at in positions])

    def _read(self, epoch: int, row: int, count: int, retries: Retries) -> list[Any]:
        """Read rows. If that fails for a moment, the epoch is read again: an iterator that has raised has ended."""
        while True:
            try:
                if retries.pauses:
                    self._read_to(epoch, row)
                return [self._next_row() for _ in range(count)]
            except Exception as error:
                retries.pause_or_raise(error, f"reading row {row} of epoch {epoch}")

    def _next_row(self) -> Any:
        while True:
            seed_host(mix(Purpose.ROW, self.seed, self._epoch, self._row))
            try:
                row = next(self._rows)
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
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self.dataset.load_state_dict(copy.deepcopy(state))
        seed_host(mix(Purpose.ROW, self.seed, epoch, row))  # some data sets fetch their first row in iter()
        self._rows: Iterator[Any] = iter(self.dataset)

    def _read_to(self, epoch: int, row: int) -> None:
        self._begin(epoch, 0, self._pristine)
        for number in range(row):
            self._next_row()
            if number % _BEAT_EVERY == 0:
                self.beat()

    def _require_repetition(self) -> None:
        """Read the first rows twice, each with the random numbers that belong to it."""
        first: list[list[str]] = []
        for _ in range(2):
            digests = []
            for number in range(_COMPARED):  # there may be fewer
                seed_host(mix(Purpose.ROW, self.seed, 0, number))
                digests += [sha256(row) for row in islice(self._rows, 1)]
            if not digests:
                raise ValueError("the iterable data set is empty: it has no rows")
            first.append(digests)
            self._read_to(0, 0)
        if first[0] != first[1]:
            raise ValueError("gives other rows after load_state_dict than before, so a run over it cannot be repeated")


def _digest(rows: list[Any]) -> str:
    return sha256([*rows[:_COMPARED], rows[-1]])


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
        if self._fed or self._older:
            super().load_state_dict(state)
            return
        self.position = self.newest_stop = state["position"]  # nothing was fetched yet: it is of an earlier process
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


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf.clone() if torch.is_tensor(leaf) else leaf
