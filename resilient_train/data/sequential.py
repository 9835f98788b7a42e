"""Samples without an index: of an iterable data set, of a loader that the caller made, and of a function."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from inspect import isgeneratorfunction
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from resilient_train.core.randomness import Purpose, mix, seed_all, seed_host
from resilient_train.core.transaction import Update
from resilient_train.data.fed import Fed, FedSamples
from resilient_train.data.rows import Collate, Retries, no_watchdog
from resilient_train.data.samples import Slicing
from resilient_train.data.trees import rebuilt
from resilient_train.ground.errors import TrainError
from resilient_train.ground.wording import log


class LoaderBatches:
    """The batches of the caller's loader, drawn one after the other.

    A loader may draw from the global generators, which rewind: each batch gets random numbers by the number fetched
    before it, in a resumed run, too. `StatefulDataLoader` and the like, and numbered rows, continue at their place.
    """

    counts_batches = True  # the length of the loader is that
    most_kept: int | None = None  # updates; None: as many as memory allows

    def __init__(self, loader: Any, slicing: Slicing, seed: int, device: torch.device) -> None:
        self.loader, self.slicing, self.seed, self.device = loader, slicing, seed, device
        self.beat: Callable[[], None] = no_watchdog
        self.drawn = 0
        self._batches: Iterator[Any] | None = None
        is_dataloader = isinstance(loader, DataLoader) and not hasattr(loader, "use_stateful_dataloader")
        self._is_stateful = is_dataloader and hasattr(loader, "load_state_dict")
        self._marks = deque[Any]()  # batches drawn before, and how it continues there

    def place(self, drawn: int) -> dict[str, Any]:
        """Return what it takes to continue behind so many batches."""
        if self._is_stateful and drawn == self.drawn:
            self._marks.append((drawn, self._mark()))
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

    def fetch(self) -> list[tuple[Any, Sequence[int]]]:
        """Fetch the micro-batches of the next update, with the indices of their rows if these are known."""
        return [(self._next_batch(), ()) for _ in range(self.slicing.accumulation)]

    def handed_out(self, kept: Sequence[Any], start: int) -> list[Any]:
        """Return the micro-batches of what was kept of the update that begins at `start`."""
        return [rebuilt(batch, copied) for batch in kept]

    def close(self) -> None:
        self._batches = None

    def begun(self) -> Iterator[Any]:
        """Begin an epoch, with the random numbers that belong to its first batch."""
        return iter(self.loader() if isgeneratorfunction(self.loader) else self.loader)

    def seed_for(self, batch: int) -> None:
        seed_all(mix(Purpose.LOADER, self.seed, batch, self.slicing.rank), self.device)

    def _mark(self) -> Any:
        return copy.deepcopy(self.loader.state_dict())

    def _load(self, mark: Any) -> None:
        self.loader.load_state_dict(copy.deepcopy(mark))

    def _ended(self) -> None:
        """Prepare for the next epoch."""
        self._batches = None

    def _failed(self) -> None:
        """Prepare for another try: most loaders continue after an error; a generator has ended."""

    def _next_batch(self) -> Any:
        number, self.drawn = self.drawn, self.drawn + 1
        retries, ends = Retries(self.beat), 0
        while ends < 2:
            self.seed_for(number)
            try:
                if self._batches is None:
                    self._batches = self.begun()
                return next(self._batches)
            except StopIteration:
                ends += 1
                self._ended()
            except Exception as error:
                retries.pause_or_raise(error, "fetching a batch of the loader")
                self._failed()
        raise TrainError("data: the loader is empty, or it has ended and cannot be iterated again: give one that can")


class RowStream(LoaderBatches):
    """The rows of an iterable data set, epoch after epoch, each with its own random numbers: the batches of the base.

    Every rank reads all of them and keeps its share: 1, 2 or 4 processes see the same updates. The state of the data
    set is trusted: what a shuffle buffer holds, most of them leave out.
    """

    counts_batches = False
    most_kept = 2  # rows may be of any size, which is not known: a rewind to before them reads again

    def __init__(self, dataset: Any, slicing: Slicing, seed: int, collate: Collate) -> None:
        super().__init__(dataset, slicing, seed, torch.device("cpu"))
        self.collate, self._is_stateful, self._epoch = collate, True, 0
        self._pristine = copy.deepcopy(dataset.state_dict())
        self._load([0, self._pristine])

    def fetch(self) -> list[tuple[Any, Sequence[int]]]:
        return [([self._next_batch() for _ in range(self.slicing.samples)], ())]

    def handed_out(self, kept: Sequence[Any], start: int) -> list[Any]:
        """Make this rank's batches of the rows, in containers of their own: a collate function may change these."""
        batches, (rows,) = [], kept
        for number, some in enumerate(self.slicing.of_this_rank(rows)):
            place = number * self.slicing.world + self.slicing.rank  # among the micro-batches on all ranks
            seed_host(mix(Purpose.COLLATE, self.seed, start, place))
            batches.append(self.collate([rebuilt(row) for row in some]))
        return batches

    def seed_for(self, batch: int) -> None:
        seed_host(mix(Purpose.ROW, self.seed, batch))

    def _mark(self) -> Any:
        return [self._epoch, super()._mark()]

    def _load(self, mark: Any) -> None:
        self._epoch, state = mark
        self._batches = None
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(self._epoch)
        super()._load(state)

    def _ended(self) -> None:
        self._load([self._epoch + 1, self._pristine])

    def _failed(self) -> None:
        self._load(self._mark())  # an iterator that has raised has ended


class LoaderSamples(FedSamples):
    """Updates of the caller's loader, kept as copies for rewinds. Positions count samples as if batches were full."""

    is_fed = False

    def __init__(self, source: LoaderBatches, **more: Any) -> None:
        super().__init__(source.slicing, **more)
        self.loader, self.counts_batches, self._source = source.loader, source.counts_batches, source

    def next_update(self) -> Update:
        self._source.beat = self.beat
        while not self.is_behind:
            self._fetch()
        return super().next_update()

    def handed_out(self, fed: Fed) -> list[Any]:
        fresh, fed.fresh = fed.fresh, []
        return fresh or self._source.handed_out(fed.batches or (), fed.start)

    def starts(self, after: int, samples: int) -> list[int]:
        while self.slicing.world == 1 and self.newest_stop <= after + samples:  # else other ranks have to fetch, too
            self._fetch()
        return super().starts(after, samples)

    def slice_as(self, slicing: Slicing) -> bool:
        if self.counts_batches:
            return False
        self.slicing = self._source.slicing = slicing
        return True

    def state_dict(self) -> dict[str, Any]:
        ahead = next(self._ahead(), None)
        if ahead is None:  # what was skipped was drawn, too
            return {"position": self.newest_stop, **self._source.place(self._source.drawn)}
        return {"position": ahead.start, **self._source.place(ahead.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kept = next((fed.start for fed in self._fed if fed.batches is not None or fed.rows), self.newest_stop)
        is_kept = state["position"] >= -self._least(-kept)
        if self._fed and (is_kept or not state["loader"]):
            super().load_state_dict(state)
            return
        self._fetch_again_from(state["position"])  # it is of an earlier process, or from before what is kept
        self._source.beat = self.beat
        self._source.go_to(state)

    def forget_before(self, position: int) -> None:
        super().forget_before(position)
        self._source.forget_before(self._fed[0].drawn if self._fed else self._source.drawn)

    def close(self) -> None:
        super().close()
        self._source.close()

    def keep(self, fed: Fed, made: Any) -> None:
        if (most := self._source.most_kept) is None:
            super().keep(fed, made)
        elif len(self._fed) > most:
            self._drop_batches(self._fed[-most - 1])

    def _fetch(self) -> None:
        drawn, made = self._source.drawn, [self.healthy(batch, rows) for batch, rows in self._source.fetch()]
        fed = self.feed()
        fed.drawn = drawn
        for batch, rows in made:
            self.feed_more(fed, rebuilt(batch, copied), rows)
        if self.counts_batches:
            fed.fresh = [rebuilt(batch) for batch, _ in made]

    def _fetch_again_from(self, position: int) -> None:
        while self._fed and self._fed[-1].start >= position:
            self._drop_batches(self._fed.pop())
        self.position = self.newest_stop = position


def copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf.clone() if torch.is_tensor(leaf) else leaf
