"""Samples without an index: of a loader that the caller made, of a function, and of an iterable data set."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from inspect import isgeneratorfunction
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from resilient_train.core.randomness import Purpose, mix, seed_all, seed_host
from resilient_train.core.transaction import Update
from resilient_train.data.fed import UNKNOWN, Drawn, Fed, FedSamples
from resilient_train.data.rows import Collate, Retries
from resilient_train.data.samples import Slicing
from resilient_train.data.trees import rebuilt
from resilient_train.ground.errors import TrainError
from resilient_train.ground.wording import log


class LoaderSamples(FedSamples):
    """The batches of the caller's loader, drawn one after the other, and kept as copies for rewinds.

    A loader may draw from the global generators, which rewind: each batch gets random numbers by the number fetched
    before it, in a resumed run, too. `StatefulDataLoader` and the like, and numbered rows, continue at their place.
    Positions count samples as if batches were full.
    """

    is_fed = False
    counts_batches = True

    def __init__(self, loader: Any, slicing: Slicing, seed: int, device: torch.device, **more: Any) -> None:
        super().__init__(slicing, **more)
        self.loader, self.seed, self.device = loader, seed, device
        self.drawn = 0
        self._iterator: Iterator[Any] | None = None
        is_dataloader = isinstance(loader, DataLoader) and not hasattr(loader, "use_stateful_dataloader")
        self._is_stateful = is_dataloader and hasattr(loader, "load_state_dict")

    def next_update(self) -> Update:
        while not self.is_behind:
            self._fetch()
        return super().next_update()

    def handed_out(self, fed: Fed) -> list[Any]:
        fresh, fed.fresh = fed.fresh, []
        return fresh or [rebuilt(batch, copied) for batch in fed.batches or ()]

    def starts(self, after: int, samples: int) -> list[int]:
        while self.slicing.world == 1 and self.newest_stop <= after + samples:  # else other ranks have to fetch, too
            self._fetch()
        return super().starts(after, samples)

    def state_dict(self) -> dict[str, Any]:
        if (ahead := next(self._ahead(), None)) is None:  # what was skipped was drawn, too
            return {"position": self.newest_stop, "drawn": self.drawn, "mark": self._mark()}
        return {"position": ahead.start, "drawn": ahead.drawn, "mark": ahead.mark}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kept = next((fed.start for fed in self._fed if fed.batches is not None or fed.rows), self.newest_stop)
        is_kept = state["position"] >= -self._least(-kept)
        if self._fed and (is_kept or state["mark"] is None):
            super().load_state_dict(state)
            return
        while self._fed and self._fed[-1].start >= state["position"]:  # of an earlier process, or from before all kept
            self._drop_batches(self._fed.pop())
        self.position = self.newest_stop = state["position"]
        self.drawn, self._iterator = state["drawn"], None
        if state["mark"] is not None:
            self._load(state["mark"])
        elif self.drawn:
            log.info("data: a loader without a state_dict begins again at its first batch, one that draws continues")

    def close(self) -> None:
        super().close()
        self._iterator = None

    def fetch(self) -> list[tuple[Any, Drawn]]:
        """Fetch the micro-batches of the next update, with what is known of their rows."""
        return [(self._next_batch(), UNKNOWN) for _ in range(self.slicing.accumulation)]

    def begun(self) -> Iterator[Any]:
        """Begin an epoch, with the random numbers that belong to its first batch."""
        return iter(self.loader() if isgeneratorfunction(self.loader) else self.loader)

    def seed_for(self, batch: int) -> None:
        seed_all(mix(Purpose.LOADER, self.seed, batch, self.slicing.rank), self.device)

    def _fetch(self) -> None:
        before, mark = self.drawn, self._mark()
        made = [self.healthy(batch, *drawn) for batch, drawn in self.fetch()]
        fed = self.feed()
        fed.drawn, fed.mark = before, mark
        for batch, rows in made:
            self.feed_more(fed, rebuilt(batch, copied), rows)
        fed.fresh = [rebuilt(batch) for batch, _ in made]

    def _mark(self) -> Any:
        """Return how the loader continues, or None if it cannot say that."""
        return copy.deepcopy(self.loader.state_dict()) if self._is_stateful else None

    def _load(self, mark: Any) -> None:
        self.loader.load_state_dict(copy.deepcopy(mark))

    def _ended(self) -> None:
        """Prepare for the next epoch."""
        self._iterator = None

    def _failed(self) -> None:
        """Prepare for another try: most loaders continue after an error; a generator has ended."""

    def _next_batch(self) -> Any:
        number, self.drawn = self.drawn, self.drawn + 1
        retries, ends = Retries(), 0
        while ends < 2:
            self.seed_for(number)
            try:
                if self._iterator is None:
                    self._iterator = self.begun()
                return next(self._iterator)
            except StopIteration:
                ends += 1
                self._ended()
            except Exception as error:
                retries.pause_or_raise(error, "fetching a batch of the loader")
                self._failed()
        raise TrainError("data: the loader is empty, or it has ended and cannot be iterated again: give one that can")


class IterableSamples(LoaderSamples):
    """The rows of an iterable data set, epoch after epoch, each with its own random numbers: the batches of the base.

    Every rank reads all of them and keeps its share, so any number of processes sees the same updates. The state of the
    data set is trusted: what a shuffle buffer holds, most of them leave out.
    """

    counts_batches = False

    def __init__(self, dataset: Any, slicing: Slicing, seed: int, make_batch: Collate, **more: Any) -> None:
        super().__init__(dataset, slicing, seed, torch.device("cpu"), **more)
        self._make_batch, self._is_stateful = make_batch, True
        self._pristine = copy.deepcopy(dataset.state_dict())
        self._load([0, self._pristine])

    def fetch(self) -> list[tuple[Any, Drawn]]:
        """Read the rows of all ranks, and make this rank's batches of them."""
        first = self.drawn
        rows = [self._next_batch() for _ in range(self.slicing.samples)]
        batches: list[tuple[Any, Drawn]] = []
        for number, some in enumerate(self.slicing.of_this_rank(rows)):
            place = number * self.slicing.world + self.slicing.rank  # among the micro-batches on all ranks
            seed_host(mix(Purpose.COLLATE, self.seed, first, place))
            batches.append((self._make_batch([*some]), UNKNOWN))
        return batches

    def seed_for(self, batch: int) -> None:
        seed_host(mix(Purpose.ROW, self.seed, batch))

    def _mark(self) -> Any:
        return [self._epoch, super()._mark()]

    def _load(self, mark: Any) -> None:
        self._epoch, state = mark
        self._iterator = None
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(self._epoch)
        super()._load(state)

    def _ended(self) -> None:
        self._load([self._epoch + 1, self._pristine])

    def _failed(self) -> None:
        self._load(self._mark())  # an iterator that has raised has ended


def copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf.clone() if torch.is_tensor(leaf) else leaf
