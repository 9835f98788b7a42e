"""Samples that a trainer fetches: kept as long as an update may be repeated."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Any

import numpy as np
import torch

from resilient_train.core.randomness import preserved
from resilient_train.core.transaction import Update
from resilient_train.core.tree import leaves
from resilient_train.data.rows import Collate, RepeatableBatches
from resilient_train.data.samples import Samples, Slicing
from resilient_train.data.stream import Key, Stream
from resilient_train.data.trees import rebuilt
from resilient_train.ground.errors import TrainError
from resilient_train.ground.wording import log

_MAX_BYTES_OF_DEVICE = 2**26  # of kept batches that are not in the memory of the host
_MAX_BYTES = 2**30  # of kept batches: older ones are fetched again, or left out of a repetition
_REMEMBERED, _MAX_ROWS = 10_000, 2**22  # older updates whose rows are known, and rows, of 8 bytes each
_LEAST_REMEMBERED = 128  # updates: no diagnosis goes further back
_REPLAYED = 64  # of these, the newest: then also what the trainer counted is known


@dataclass(slots=True)
class Fed:
    """An update as the trainer fetched it."""

    start: int
    stop: int
    batches: list[Any] | None  # None once it is too old to be kept
    rows: list[array[int]]  # of each batch; empty if they have no index
    nbytes: int = 0  # of what is kept
    number: int = 0  # of its first batch in the epoch, for a trainer that counts them
    settings: Sequence[list[dict[str, Any]]] = ()  # what the trainer's schedule set in each optimizer's groups for it
    before: Any = None  # what else the trainer counts, as it was before it
    more: dict[str, Any] = field(default_factory=dict)  # what the trainer needs to make it again
    prepared: list[Any] = field(default_factory=list)  # what it has made of the batches; kept as long as these

    @property
    def keys(self) -> list[Sequence[Key]]:
        return [[Key(0, self.start, row) for row in rows] for rows in self.rows]


class FedSamples(Samples):
    """Updates in the order in which a trainer fetched them; after a rewind they come again."""

    is_fed = True

    def __init__(
        self,
        slicing: Slicing,
        *,
        dataset: Any = None,
        collate: Collate | None = None,
        updates: int = 0,
        keeps_places: bool = True,
        least: Callable[[float], float] = lambda number: number,
    ) -> None:
        """`collate` makes a batch of rows of `dataset`, which is map-style; without them rows have no index.

        `updates` were made by earlier processes; with `keeps_places` a resume finds its place in the data. `least` is
        that of a number over all ranks, which may have kept different numbers of batches.
        """
        self.slicing, self.dataset, self._least = slicing, dataset, least
        self.position, self.keeps_places = updates * slicing.samples, keeps_places
        self.rows = len(dataset) if dataset is not None else 0
        self.stream, self._fetcher = Stream(self.rows, 0), RepeatableBatches(dataset, collate or list)
        self.skipped = self.stream.skipped
        self._fed: deque[Fed] = deque()  # that may come again
        most = _MAX_ROWS // (slicing.batch_size * slicing.accumulation)
        self._older = deque[Fed](maxlen=min(_REMEMBERED, max(_LEAST_REMEMBERED, most)))  # without their batches
        self._kept_bytes = 0  # of all batches that are kept
        self._has_dropped = False
        self.newest_stop = self.position  # the end of everything that was fetched
        self.current: Fed | None = None  # the update that was served last
        self._served: Update | None = None  # the same, as it was served

    def feed(self, batches: list[Any], rows: Sequence[Sequence[int]] = ()) -> Fed:
        """Take the micro-batches of one update; `rows` are the indices of their rows, if these are known of all."""
        fed = Fed(self.newest_stop, self.newest_stop + self.slicing.samples, [], [])
        self._fed.append(fed)
        self.newest_stop = fed.stop
        known = rows if len(rows) == len(batches) else [()] * len(batches)
        for batch, some in zip(batches, known, strict=True):
            self.feed_more(fed, batch, some)
        return fed

    def feed_more(self, fed: Fed, batch: Any, rows: Sequence[int] = ()) -> None:
        assert fed.batches is not None
        are_known = bool(rows) and len(fed.rows) == len(fed.batches)
        fed.batches.append(batch)
        fed.rows = [*fed.rows, array("q", rows)] if are_known else []
        if fed is self.current:  # not if it is left out
            assert self._served is not None
            self._served.batches.append(rebuilt(batch))
            self._served.keys[:] = fed.keys
        self.keep(fed, batch)

    def cut(self, fed: Fed, count: int) -> None:
        """Forget the micro-batches of the newest update that follow its first `count`, which were not taken."""
        assert fed.batches is not None
        every = [fed.batches, fed.rows, *fed.more.values()]
        if fed is self.current and self._served is not None:
            every += [self._served.batches, self._served.keys]
        for one in every:
            del one[count:]

    def keep(self, fed: Fed, made: Any) -> None:
        """Count what was added to an update, and drop the batches of older ones if all take too much."""
        tensors = [leaf for leaf in leaves(made) if isinstance(leaf, torch.Tensor | np.ndarray)]
        nbytes = sum(one.nbytes for one in tensors)
        most = _MAX_BYTES_OF_DEVICE if any(getattr(one, "is_cuda", False) for one in tensors) else _MAX_BYTES
        fed.nbytes, self._kept_bytes = fed.nbytes + nbytes, self._kept_bytes + nbytes
        for old in self._fed:
            if self._kept_bytes <= most:
                break
            if old.batches is None or old is fed or old is self.current:  # which may be repeated without a rewind
                continue
            if not self._has_dropped and not self.rows:
                self._has_dropped = True
                why = "a rewind leaves the oldest out, unless the loader can continue at their place"
                log.info("data: kept batches exceed %d MiB: %s", most >> 20, why)
            self._drop_batches(old)

    def healthy(self, batch: Any, rows: Sequence[int]) -> tuple[Any, Sequence[int]]:
        """Return a batch that was just fetched, with others in the places of rows that are in quarantine."""
        if self.stream.quarantined.isdisjoint(rows):
            return batch, rows
        keys = self._without_quarantined([Key(0, self.newest_stop, row) for row in rows])
        with preserved(torch.device("cpu")):
            return self.collated(keys), [key.row for key in keys]

    def forget_before(self, position: int) -> None:
        while self._fed and self._fed[0].start < position:
            fed = self._fed.popleft()
            self._drop_batches(fed)
            self._older.append(fed)
            if len(self._older) > _REPLAYED:  # of the others only the rows are asked for
                old = self._older[-_REPLAYED - 1]
                old.settings, old.before, old.more = (), None, {}

    def at(self, start: int) -> Fed:
        known = chain(reversed(self._fed), reversed(self._older))
        return next(fed for fed in known if fed.start == start)

    @property
    def skips_newest(self) -> bool:
        newest = self._fed[-1]
        return self.skipped.end_at(newest.start) != newest.start

    @property
    def is_behind(self) -> bool:
        """Say whether updates that were fetched are still to be made. Moves past those that are left out."""
        if next(self._ahead(), None) is not None:
            return True
        self.position = self.newest_stop
        return False

    def _ahead(self) -> Iterator[Fed]:
        ahead = [*takewhile(lambda fed: fed.start >= self.position, reversed(self._fed))]
        for fed in reversed(ahead):
            is_available = fed.batches is not None or fed.rows
            if is_available and self.skipped.end_at(fed.start) == fed.start:
                yield fed

    def _drop_batches(self, fed: Fed) -> None:
        self._kept_bytes -= fed.nbytes
        fed.batches, fed.nbytes = None, 0
        fed.prepared.clear()

    def _without_quarantined(self, keys: Sequence[Key]) -> list[Key]:
        bad = self.stream.quarantined
        others = iter(self.stream.others(keys, 0))
        return [next(others) if key.row in bad else key for key in keys]

    @property
    def next_start(self) -> int:
        return next((fed.start for fed in self._ahead()), self.position)

    def next_update(self) -> Update:
        fed = next(self._ahead(), None)
        if fed is None:
            raise TrainError("the trainer has fetched no batch for the next update")
        bad, again = self.stream.quarantined, list[Any]()
        if fed.rows and (fed.batches is None or not all(map(bad.isdisjoint, fed.rows))):
            healthy = [self._without_quarantined(keys) for keys in fed.keys]
            self._drop_batches(fed)
            fed.rows = [array("q", [key.row for key in keys]) for keys in healthy]
            fed.batches = again = [self.collated(keys) for keys in healthy]
        self.keep(fed, again)
        assert fed.batches is not None
        self.position, self.current = fed.stop, fed
        self._served = Update(fed.start, fed.stop, self.handed_out(fed), fed.keys)
        return self._served

    def handed_out(self, fed: Fed) -> list[Any]:
        """Return the batches in containers of their own: the trainer may take entries out of one."""
        return [rebuilt(batch) for batch in fed.batches or ()]

    def go_back(self, update: Update) -> None:
        self.position = update.start

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        first = next((fed.start for fed in self._ahead()), self.newest_stop)
        self.position = -round(self._least(-first))  # the ranks make the same updates again

    def close(self) -> None:
        self._fed.clear()
        self._older.clear()

    def _fetch_again_from(self, position: int) -> None:
        for fed in self._fed:
            self._drop_batches(fed)
        before = [fed for fed in chain(self._older, self._fed) if fed.start < position]
        self._fed.clear()
        self._older.clear()
        self._older.extend(before)
        self.position = self.newest_stop = position

    def rows_at(self, start: int, stop: int) -> tuple[int, ...]:
        within = [fed for fed in chain(self._older, self._fed) if start <= fed.start < stop]
        made = [fed for fed in within if self.skipped.end_at(fed.start) == fed.start]
        return tuple(sorted({row for fed in made for rows in fed.rows for row in rows}))

    def keys_at(self, start: int) -> list[Sequence[Key]]:
        return self.at(start).keys

    def starts(self, after: int, samples: int) -> list[int]:
        """Only updates that were fetched already are known."""
        return [fed.start for fed in self._fed if after < fed.start <= after + samples]
