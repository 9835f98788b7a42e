"""Samples without an index: of an iterable data set, of a loader that the caller made, and of a function."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from inspect import isgeneratorfunction
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from resilient_train.core.randomness import Purpose, mix, seed_all, seed_host
from resilient_train.core.transaction import Update
from resilient_train.data.fed import Fed, FedSamples
from resilient_train.data.rows import Collate, Retries, SeededRows, no_watchdog
from resilient_train.data.samples import Slicing
from resilient_train.data.trees import rebuilt, sha256
from resilient_train.ground.errors import StorageFailed, TrainError, in_one_line
from resilient_train.ground.wording import log

_BEAT_EVERY = 1_000  # rows that are only read to find a place
_COMPARED = 4  # rows that show whether the same place was found again


class LoaderBatches:
    """The batches of the caller's loader, drawn one after the other.

    A loader may draw from the global generators, which rewind: each batch gets random numbers by the number fetched
    before it, in a resumed run, too. `StatefulDataLoader` and the like, and numbered rows, continue at their place.
    """

    def __init__(self, loader: Any, slicing: Slicing, seed: int, device: torch.device) -> None:
        self.loader, self.slicing, self.seed, self.device = loader, slicing, seed, device
        self.beat: Callable[[], None] = no_watchdog
        self.drawn = 0
        self._batches: Iterator[Any] | None = None
        is_dataloader = isinstance(loader, DataLoader) and not hasattr(loader, "use_stateful_dataloader")
        self._stateful: Any = loader if is_dataloader and hasattr(loader, "load_state_dict") else None
        self._marks = deque[Any]()  # batches drawn before, and how it continues there

    def place(self, drawn: int) -> dict[str, Any]:
        """Return what it takes to continue behind so many batches."""
        if self._stateful is not None and drawn == self.drawn:
            self._marks.append((drawn, copy.deepcopy(self._stateful.state_dict())))
        before = [one for one in self._marks if one[0] <= drawn][-1:]
        return {"drawn": drawn, "loader": [[drawn - at, mark] for at, mark in before]}

    def forget_before(self, drawn: int) -> None:
        while len(self._marks) > 1 and self._marks[1][0] <= drawn:
            self._marks.popleft()

    def go_to(self, place: dict[str, Any]) -> None:
        self.drawn, self._batches = place["drawn"], None
        self._marks.clear()
        if place.get("loader"):
            self.continue_from(*place["loader"][0])
        elif self.drawn:
            log.info("data: a loader without a state_dict begins again at its first batch, one that draws continues")

    def continue_from(self, behind: int, mark: Any) -> None:
        self.drawn -= behind
        self._marks.append((self.drawn, mark))
        self._load(mark)
        for _ in range(behind):
            self._next_batch()

    def _load(self, mark: Any) -> None:
        self._stateful.load_state_dict(copy.deepcopy(mark))

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
    """Updates of the caller's loader, kept as copies for rewinds. Positions count samples as if batches were full."""

    is_fed = False

    def __init__(self, source: LoaderBatches, **more: Any) -> None:
        super().__init__(source.slicing, **more)
        self.loader, self._source = source.loader, source

    @property
    def next_start(self) -> int:
        return next((fed.start for fed in self._ahead()), self.skipped.end_at(self.newest_stop))

    def next_update(self) -> Update:
        self._source.beat = self.beat
        while not self.is_behind:
            self._fetch()
        return super().next_update()

    def handed_out(self, fed: Fed) -> list[Any]:
        kept, fresh = fed.more.pop("fresh", (None, []))
        return fresh if kept is fed.batches else [rebuilt(batch, _copied) for batch in fed.batches or ()]

    def starts(self, after: int, samples: int) -> list[int]:
        while self.slicing.world == 1 and self.newest_stop <= after + samples:  # else other ranks have to fetch, too
            self._fetch()
        return super().starts(after, samples)

    def state_dict(self) -> dict[str, Any]:
        ahead = next(self._ahead(), None)
        if ahead is None:  # what was skipped was drawn, too
            return {"position": self.newest_stop, **self._source.place(self._source.drawn)}
        return {"position": ahead.start, **self._source.place(ahead.number)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kept = next((fed.start for fed in self._fed if fed.batches is not None or fed.rows), self.newest_stop)
        is_kept = state["position"] >= -self._least(-kept)
        if (self._fed or self._older) and (is_kept or not state["loader"]):
            super().load_state_dict(state)
            return
        self._fetch_again_from(state["position"])  # it is of an earlier process, or from before what is kept
        self._source.beat = self.beat
        self._source.go_to(state)

    def forget_before(self, position: int) -> None:
        super().forget_before(position)
        self._source.forget_before(self._fed[0].number if self._fed else self._source.drawn)

    def close(self) -> None:
        super().close()
        self._source._batches = None

    def _fetch(self) -> None:
        drawn = self._source.drawn
        made = [self.healthy(batch, rows) for batch, rows in self._source.fetch()]
        fed = self.feed([rebuilt(batch, _copied) for batch, _ in made], [rows for _, rows in made])
        fed.number = drawn
        fed.more["fresh"] = fed.batches, [rebuilt(batch) for batch, _ in made]


class RowStream(LoaderBatches):
    """The rows of an iterable data set, epoch after epoch, each with its own random numbers: the batches of the base.

    Every rank reads all of them and keeps its share: 1, 2 or 4 processes see the same updates. Some states leave out
    what a shuffle buffer holds. So a place is noted with a state whose next rows were read since, and these show
    whether it leads there. If it does not, the epoch is read from its first row.
    """

    def __init__(self, dataset: Any, slicing: Slicing, seed: int) -> None:
        """Begin at the first row. Raises ValueError if the data set does not repeat itself."""
        super().__init__(dataset, slicing, seed, torch.device("cpu"))
        self._pristine, self._is_exact = copy.deepcopy(dataset.state_dict()), True
        self._marks.append((0, [0, 0, None, ""]))  # rows drawn; epoch, row, state, digest of the rows that follow
        self._require_repetition()

    def place(self, drawn: int) -> dict[str, Any]:
        if drawn == self.drawn and self._is_exact and self._marks[-1][0] < drawn:
            self._marks.append((drawn, [self._epoch, self._row, copy.deepcopy(self.loader.state_dict()), None]))
        at, mark = next(one for one in reversed(self._marks) if one[0] <= drawn and one[1][-1] is not None)
        return {"drawn": drawn, "loader": [[drawn - at, mark]]}

    def forget_before(self, drawn: int) -> None:
        while len(self._marks) > 1 and self._marks[1][0] <= drawn and self._marks[1][1][-1] is not None:
            self._marks.popleft()

    def _load(self, mark: Any) -> None:
        epoch, row, state, digest = mark
        if state is not None and self._leads_to(epoch, row, state, digest):
            self._begin(epoch, row, state)
        else:
            self._read_to(epoch, row)

    def fetch(self) -> list[tuple[Any, Sequence[int]]]:
        (at, mark), began = self._marks[-1], self.drawn
        rows = [self._next_batch() for _ in range(self.slicing.samples)]
        if at == began and mark[-1] is None:
            mark[-1] = sha256(rows[:_COMPARED])
        return [(rows, ())]

    def _next_batch(self) -> Any:
        """Read one row. If that fails for a moment, the epoch is read again: an iterator that has raised has ended."""
        self.drawn += 1
        retries, epoch, row = Retries(self.beat), self._epoch, self._row
        while True:
            try:
                if retries.pauses:
                    self._read_to(epoch, row)
                return self._next_row()
            except Exception as error:
                retries.pause_or_raise(error, f"reading row {row} of epoch {epoch}")

    def _next_row(self) -> Any:
        assert self._batches is not None
        for row in self._batches:
            self._row += 1
            return row
        if self._row == 0:
            raise TrainError("data: the iterable data set has no rows any more")
        self._begin(self._epoch + 1, 0, self._pristine)
        return self._next_row()

    def _begin(self, epoch: int, row: int, state: Any) -> None:
        self._epoch, self._row = epoch, row
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)
        self.loader.load_state_dict(copy.deepcopy(state))
        self._batches = SeededRows(self.loader, self.seed, epoch, row)

    def _read_to(self, epoch: int, row: int) -> None:
        self._begin(epoch, 0, self._pristine)
        for number in range(row):
            self._next_row()
            if number % _BEAT_EVERY == 0:
                self.beat()

    def _leads_to(self, epoch: int, row: int, state: Any, digest: str) -> bool:
        try:
            self._begin(epoch, row, state)
            is_same: bool = sha256([self._next_row() for _ in range(min(_COMPARED, self.slicing.samples))]) == digest
            why = "it leads to other rows"
        except Exception as error:
            is_same, why = False, in_one_line(error)
        if not is_same:
            self._is_exact, kind = False, type(self.loader).__name__
            log.warning("data: the state of this %s cannot be used (%s): its epoch is read again", kind, why)
        return is_same

    def _require_repetition(self) -> None:
        first = []
        for _ in range(2):
            self._begin(0, 0, self._pristine)
            first.append([sha256(row) for row in islice(self._batches or (), _COMPARED)])  # there may be fewer
        if not first[0]:
            raise ValueError("the iterable data set is empty: it has no rows")
        self._begin(0, 0, self._pristine)
        if first[0] != first[1]:
            raise ValueError("gives other rows after load_state_dict than before, so a run over it cannot be repeated")


class IterableSamples(LoaderSamples):
    """Samples of an iterable data set that rewinds. Two updates are kept; a rewind to before them reads rows again."""

    def __init__(self, dataset: Any, slicing: Slicing, *, seed: int, collate: Collate, **more: Any) -> None:
        """Raises ValueError if the data set does not repeat itself."""
        super().__init__(RowStream(dataset, slicing, seed), **more)
        self.seed, self.collate = seed, collate

    def handed_out(self, fed: Fed) -> list[Any]:
        """Make this rank's batches of the rows, in containers of their own: a collate function may change these."""
        batches, (rows,) = [], fed.batches or ([],)
        for number, some in enumerate(self.slicing.of_this_rank(rows)):
            place = number * self.slicing.world + self.slicing.rank  # among the micro-batches on all ranks
            seed_host(mix(Purpose.COLLATE, self.seed, fed.start, place))
            batches.append(self.collate([rebuilt(row) for row in some]))
        return batches

    def keep(self, fed: Fed, made: Any) -> None:
        if len(self._fed) > 2:
            self._drop_batches(self._fed[-3])

    def slice_as(self, slicing: Slicing) -> bool:
        self.slicing = self._source.slicing = slicing
        return True

    def _fetch(self) -> None:
        drawn = self._source.drawn
        rows = [rebuilt(row, _copied) for row in self._source.fetch()[0][0]]
        self.feed([rows]).number = drawn


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf.clone() if torch.is_tensor(leaf) else leaf
