"""Samples that cannot be fetched from any position, of a trainer or a loader: kept while an update may be repeated."""

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
from resilient_train.data.rows import Collate, FailedRow, RepeatableBatches, Retries, with_substitutes
from resilient_train.data.samples import Samples, Slicing
from resilient_train.data.stream import Key, Stream
from resilient_train.data.trees import rebuilt
from resilient_train.ground.errors import StorageFailed
from resilient_train.ground.wording import log

_MAX_BYTES = 2**28  # of kept batches: older ones are fetched again, or left out of a repetition
_OLDER = 16  # updates to which no rewind goes back, and which a diagnosis may compare with

Drawn = tuple[Sequence[int], Sequence[FailedRow]]  # indices of a batch's rows; those that raised, and were replaced
UNKNOWN: Drawn = (), ()


@dataclass(slots=True)
class Fed:
    """An update as it was fetched."""

    start: int
    stop: int
    drawn: int = 0  # batches, or rows, of the loader before it
    mark: Any = None  # how the loader continues there; None if it cannot say that
    batches: list[Any] | None = field(default_factory=list)  # None once it is too old to be kept
    rows: list[array[int]] = field(default_factory=list)  # of each batch; empty if they have no index
    nbytes: int = 0  # of what is kept
    fresh: list[Any] = field(default_factory=list)  # the batches of a loader as they came, until they are handed out
    settings: Sequence[list[dict[str, Any]]] = ()  # what the trainer's schedule set in each optimizer's groups for it
    places: list[Any] = field(default_factory=list)  # what else the trainer counts, as it was before each batch
    prepared: list[Any] = field(default_factory=list)  # what it has made of the batches; kept as long as these

    @property
    def keys(self) -> list[Sequence[Key]]:
        return [[Key(0, self.start, row) for row in rows] for rows in self.rows]


class FedSamples(Samples):
    """Updates in the order in which they were fetched; after a rewind they come again."""

    is_fed = True

    def __init__(
        self,
        slicing: Slicing,
        *,
        dataset: Any = None,
        collate: Collate | None = None,
        updates: int = 0,
        least: Callable[[float], float] = lambda number: number,
    ) -> None:
        """`collate` makes a batch of rows of `dataset`, which is map-style; without them rows have no index.

        `updates` were made by earlier processes. `least` is that of a number over all ranks, which may have kept
        different numbers of batches.
        """
        self.slicing, self.dataset, self._least = slicing, dataset, least
        self.position = updates * slicing.samples
        self.rows = len(dataset) if dataset is not None else 0
        self.stream, self._fetcher = Stream(self.rows, 0), RepeatableBatches(dataset, collate or list)
        self.skipped = self.stream.skipped
        self.failures = dict[int, FailedRow]()  # rows that raised when they were fetched, in whose places others are
        self._fed: deque[Fed] = deque()  # that may come again, and a few older ones
        self._kept_bytes = 0  # of all batches that are kept
        self._has_dropped = False
        self.newest_stop = self.position  # the end of everything that was fetched
        self.current: Fed | None = None  # the update that was served last
        self._served: Update | None = None  # the same, as it was served
        self._unserved: Fed | None = None  # the trainer has fetched it now: it runs it also if it is to be skipped

    def feed(self) -> Fed:
        """Begin the next update, which `feed_more` gives its micro-batches."""
        fed = Fed(self.newest_stop, self.newest_stop + self.slicing.samples)
        self._fed.append(fed)
        self._unserved = fed if self.is_fed else None
        self.newest_stop = fed.stop
        return fed

    def feed_more(self, fed: Fed, batch: Any, rows: Sequence[int] = ()) -> None:
        """Add a micro-batch; `rows` are the indices of its rows, which an update has of all of them or of none."""
        assert fed.batches is not None
        are_known = bool(rows) and len(fed.rows) == len(fed.batches)
        fed.batches.append(batch)
        fed.rows = [*fed.rows, array("q", rows)] if are_known else []
        if fed is self.current:
            assert self._served is not None
            self._served.batches.append(rebuilt(batch))
            self._served.keys[:], self._served.failed[:] = fed.keys, self._replaced_in(fed)
        self.keep(fed, batch)

    def keep(self, fed: Fed, made: Any) -> None:
        """Count what was added to an update, and drop the batches of older ones if all take too much."""
        tensors = [leaf for leaf in leaves(made) if isinstance(leaf, torch.Tensor | np.ndarray)]
        nbytes = sum(one.nbytes for one in tensors)
        fed.nbytes, self._kept_bytes = fed.nbytes + nbytes, self._kept_bytes + nbytes
        for old in self._fed:
            if self._kept_bytes <= _MAX_BYTES:
                break
            if old.batches is None or old is fed or old is self.current:  # which may be repeated without a rewind
                continue
            if not self._has_dropped and not self.rows:
                self._has_dropped = True
                why = "a rewind leaves the oldest out, unless the loader can continue at their place"
                log.info("data: kept batches exceed %d MiB: %s", _MAX_BYTES >> 20, why)
            self._drop_batches(old)

    def healthy(self, batch: Any, rows: Sequence[int], failed: Sequence[FailedRow]) -> tuple[Any, Sequence[int]]:
        """Return a batch that was just fetched, with others in the places of rows that are in quarantine."""
        self.failures = {row: one for row, one in self.failures.items() if row not in rows}  # it came
        self.failures |= {one.row: one for one in failed}
        if self.stream.quarantined.isdisjoint(rows):
            return batch, rows
        keys = self._without_quarantined([Key(0, self.newest_stop, row) for row in rows])
        with preserved(torch.device("cpu")):
            return self._made(keys), [key.row for key in keys]

    def forget_before(self, position: int) -> None:
        while self._fed and self._fed[0].start < position - _OLDER * self.slicing.samples:
            self._drop_batches(self._fed.popleft())

    def at(self, start: int) -> Fed:
        return next(fed for fed in reversed(self._fed) if fed.start == start)

    @property
    def is_behind(self) -> bool:
        """Say whether updates that were fetched are still to be made. Moves past those that are left out."""
        if next(self._ahead(), None) is not None:
            return True
        self.position = self.newest_stop
        return False

    def skips(self, fed: Fed) -> bool:
        return self.skipped.end_at(fed.start) != fed.start

    def _ahead(self) -> Iterator[Fed]:
        ahead = [*takewhile(lambda fed: fed.start >= self.position, reversed(self._fed))]
        return (fed for fed in reversed(ahead) if (fed.batches or fed.rows) and not self.skips(fed))

    def _drop_batches(self, fed: Fed) -> None:
        self._kept_bytes -= fed.nbytes
        fed.batches, fed.nbytes = None, 0
        fed.fresh.clear()
        fed.prepared.clear()
        fed.mark = fed.mark if fed.rows else None  # else nothing goes back there

    def _without_quarantined(self, keys: Sequence[Key]) -> list[Key]:
        bad = self.stream.quarantined
        others = iter(self.stream.others(keys, 0))
        return [next(others) if key.row in bad else key for key in keys]

    @property
    def next_start(self) -> int:
        return next((fed.start for fed in self._ahead()), self.skipped.end_at(self.newest_stop))

    def next_update(self) -> Update:
        fed, self._unserved = self._unserved or next(self._ahead(), None), None
        if fed is None:
            raise StorageFailed(
                "the next update", "the trainer has fetched no batch for it, or it was too old to be kept"
            )
        bad, again = self.stream.quarantined, list[Any]()
        if fed.rows and (fed.batches is None or not all(map(bad.isdisjoint, fed.rows))):
            healthy = [self._without_quarantined(keys) for keys in fed.keys]
            self._drop_batches(fed)
            fed.rows = [array("q", [key.row for key in keys]) for keys in healthy]
            fed.batches = again = [self._made(keys) for keys in healthy]
        self.keep(fed, again)
        self.position, self.current = fed.stop, fed
        self._served = Update(fed.start, fed.stop, self.handed_out(fed), fed.keys, self._replaced_in(fed))
        return self._served

    def _made(self, keys: Sequence[Key]) -> Any:
        batch, _, failed = with_substitutes(keys, self.stream, self._fetcher, Retries())
        self.failures |= {one.row: one for one in failed}
        return batch

    def _replaced_in(self, fed: Fed) -> list[FailedRow]:
        return [self.failures[row] for row in chain(*fed.rows) if row in self.failures]

    def handed_out(self, fed: Fed) -> list[Any]:
        """Return the batches in containers of their own: the trainer may take entries out of one."""
        return [rebuilt(batch) for batch in fed.batches or ()]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        first = next((fed.start for fed in self._ahead()), self.newest_stop)
        self.position = -round(self._least(-first))  # the ranks make the same updates again

    def close(self) -> None:
        self._fed.clear()

    def rows_at(self, start: int, stop: int) -> tuple[int, ...]:
        return ()  # asked by a process that has fetched nothing yet

    def keys_at(self, start: int) -> list[Sequence[Key]]:
        return self.at(start).keys

    def batches_at(self, start: int) -> list[Any]:
        return self.handed_out(self.at(start)) or super().batches_at(start)

    def starts(self, after: int, samples: int) -> list[int]:
        """Only updates that were fetched already are known."""
        return [fed.start for fed in self._fed if after < fed.start <= after + samples]
