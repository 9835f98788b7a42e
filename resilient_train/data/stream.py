"""The endless stream of samples: perm(seed, 0), then perm(seed, 1), and so on without end.

Everything here is arithmetic on positions. A position counts samples, never batches, so it means the same
for any number of processes, workers and micro-batches, and jumping to one costs nothing.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

# Numbers drawn for one purpose are independent of those for another. Permutations have no such mark.
_SUBSTITUTE = 1
_OTHERS = 2


class Key(NamedTuple):
    """Identifies a sample: enough to fetch it again with the same random numbers."""

    seed: int
    epoch: int
    row: int


class Span(NamedTuple):
    """The samples of one update: `keys`, from positions `[start, stop)` of the stream. The first is at `start`."""

    start: int
    stop: int
    keys: list[Key]


class Ranges:
    """Ranges `[start, stop)` of positions, sorted and merged where they touch."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> None:
        if not 0 <= start < stop:
            raise ValueError(f"cannot skip [{start}, {stop}): a range needs 0 <= start < stop")
        insort(self.spans, (start, stop))
        merged: list[tuple[int, int]] = []
        for low, high in self.spans:
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self.spans = merged

    def outside(self, at: int, count: int) -> list[tuple[int, int]]:
        """Return the first `count` positions from `at` on that are in no range, as spans."""
        found = []
        for low, high in self.spans:
            if count and high > at:
                end = min(low, at + count)
                if end > at:
                    found.append((at, end))
                    count -= end - at
                at = high
        return [*found, (at, at + count)] if count else found

    def end_at(self, at: int) -> int:
        """Return the first position from `at` on that is in no range."""
        return self.outside(at, 1)[0][0]


class Stream:
    """Positions 0, 1, 2, ... of an endless stream over `rows` rows.

    Skipped ranges and quarantined rows are remedies, not part of the run's state: they do not rewind.
    """

    def __init__(self, rows: int, seed: int, *, shuffle: bool = True) -> None:
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.skipped = Ranges()
        self.quarantined: frozenset[int] = frozenset()
        self._orders: dict[int, np.ndarray] = {}

    def take(self, position: int, count: int) -> Span:
        """Return the next `count` samples from `position` on, without skipped ranges."""
        spans = self.skipped.outside(position, count)
        return Span(spans[0][0], spans[-1][1], [key for span in spans for key in self._keys(*span)])

    def quarantine(self, rows: Iterable[int]) -> None:
        """Replace these rows by healthy ones from now on. All other places of the stream stay as they were."""
        quarantined = self.quarantined | {int(row) for row in rows}
        if any(not 0 <= row < self.rows for row in quarantined):
            raise ValueError(f"a quarantined row lies outside of 0..{self.rows - 1}")
        if len(quarantined) == self.rows:
            raise ValueError(f"all {self.rows} rows would be in quarantine: nothing is left to train on")
        self.quarantined = quarantined

    def others(self, keys: Sequence[Key], draw: int, *, without: Collection[int] = ()) -> list[Key]:
        """Return as many keys of other healthy rows, each in the epoch of the key in its place.

        A row repeats only if there are too few, and a row of `keys` is used only if there is no other. Rows in
        quarantine or in `without` are never used: the list is empty if there are no others.
        """
        left_out = self.quarantined.union(without)
        if len(with_these := left_out.union(key.row for key in keys)) < self.rows:
            left_out = with_these
        if not (left := self.rows - len(left_out)):
            return []
        origin = [number for key in keys for number in (key.epoch, key.row)]
        numbers = np.random.default_rng([self.seed, draw, *origin, _OTHERS])
        others: list[Key] = []
        used: set[int] = set()
        while len(others) < len(keys):
            row = int(numbers.integers(self.rows))
            if row not in left_out and row not in used:
                others.append(Key(self.seed, keys[len(others)].epoch, row))
                used.add(row)
                if len(used) == left:
                    used.clear()
        return others

    def _keys(self, start: int, stop: int) -> list[Key]:
        keys: list[Key] = []
        while start < stop:
            epoch, slot = divmod(start, self.rows)
            end = min(self.rows, slot + stop - start)
            rows = self._order(epoch)[slot:end].tolist()
            if not self.quarantined.isdisjoint(rows):
                bad = self.quarantined
                rows = [self._substitute(epoch, slot + at) if row in bad else row for at, row in enumerate(rows)]
            keys += map(Key, repeat(self.seed), repeat(epoch), rows)
            start += end - slot
        return keys

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            order = np.arange(self.rows, dtype=np.uint32 if self.rows < 2**32 else np.uint64)
            if self.shuffle:
                np.random.default_rng([self.seed, epoch]).shuffle(order)
            while len(self._orders) > 1:  # an update spans at most two epochs, unless it has more samples than rows
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = order
        return order

    def _substitute(self, epoch: int, slot: int) -> int:
        numbers = np.random.default_rng([self.seed, epoch, slot, _SUBSTITUTE])
        while (row := int(numbers.integers(self.rows))) in self.quarantined:
            pass
        return row
