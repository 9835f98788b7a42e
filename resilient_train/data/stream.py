"""The endless stream of samples: perm(seed, 0), then perm(seed, 1), and so on without end.

Everything here is arithmetic on positions. A position counts samples, never batches, so it means the same
for any number of processes, workers and micro-batches, and jumping to one costs nothing.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

# Keep the numbers that are drawn for one purpose apart from those of another; permutations have none.
_SUBSTITUTE = 1
_OTHERS = 2


class Key(NamedTuple):
    """What names one sample for ever: enough to fetch it again with the same random numbers."""

    seed: int
    epoch: int
    row: int


class Span(NamedTuple):
    """The samples of one update: `keys`, from positions `[start, stop)` of the stream; the first lies at `start`."""

    start: int
    stop: int
    keys: list[Key]


class Ranges:
    """Ranges of positions, merged where they touch."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._ranges)

    def add(self, start: int, stop: int) -> None:
        """Include positions `[start, stop)`."""
        if not 0 <= start < stop:
            raise ValueError(f"cannot skip [{start}, {stop}): a range needs 0 <= start < stop")
        insort(self._ranges, (start, stop))
        merged: list[tuple[int, int]] = []
        for low, high in self._ranges:
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self._ranges = merged

    def next(self, at: int) -> tuple[int | None, int]:
        """Where the next range begins, which is `at` inside of one, and where it ends; None if there is no next."""
        place = bisect_right(self._ranges, (at, at))
        if place and self._ranges[place - 1][1] > at:
            return at, self._ranges[place - 1][1]
        if place < len(self._ranges):
            return self._ranges[place]
        return None, at

    def end_at(self, at: int) -> int:
        """The first position from `at` on that is in no range."""
        low, high = self.next(at)
        return high if low == at else at


class Stream:
    """Positions 0, 1, 2, ... of an endless stream over `rows` rows.

    Skipped ranges and quarantined rows belong to the run's remedies, not to its state: they do not rewind.
    """

    def __init__(self, rows: int, seed: int, *, shuffle: bool = True) -> None:
        if rows < 1:
            raise ValueError("a stream needs at least one row")
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.skipped = Ranges()
        self.quarantined: frozenset[int] = frozenset()
        self._orders: dict[int, np.ndarray] = {}

    def take(self, position: int, count: int) -> Span:
        """Return the next `count` samples from `position` on, passing over skipped ranges."""
        start = at = self.skipped.end_at(position)
        keys: list[Key] = []
        while True:
            low, high = self.skipped.next(at)
            end = at + count - len(keys) if low is None else min(low, at + count - len(keys))
            keys += self._keys(at, end)
            if len(keys) == count:
                return Span(start, end, keys)
            at = high

    def quarantine(self, rows: Iterable[int]) -> None:
        """Replace these rows by healthy ones from now on; every other place of the stream stays what it was."""
        quarantined = self.quarantined | {int(row) for row in rows}
        if any(not 0 <= row < self.rows for row in quarantined):
            raise ValueError(f"a quarantined row lies outside of 0..{self.rows - 1}")
        if len(quarantined) == self.rows:
            raise ValueError(f"all {self.rows} rows would be in quarantine: nothing is left to train on")
        self.quarantined = quarantined

    def others(self, keys: Sequence[Key], draw: int, *, without: Collection[int] = ()) -> list[Key]:
        """Return as many keys of other healthy rows, each in the epoch of the key in its place.

        A row comes twice only where there are too few, and a row of `keys` only where there is no other at all. None
        is in quarantine or in `without`: where that leaves nothing, neither does this.
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
            indices = self._order(epoch)[slot:end].tolist()
            if self.quarantined:
                indices = [
                    self._substitute(epoch, place) if index in self.quarantined else index
                    for place, index in enumerate(indices, start=slot)
                ]
            keys += [Key(self.seed, epoch, index) for index in indices]
            start += end - slot
        return keys

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            order = np.arange(self.rows, dtype=np.uint32 if self.rows < 2**32 else np.uint64)
            if self.shuffle:
                np.random.default_rng([self.seed, epoch]).shuffle(order)
            while len(self._orders) > 1:  # an update meets two epochs at most where rows outnumber its samples
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = order
        return order

    def _substitute(self, epoch: int, slot: int) -> int:
        numbers = np.random.default_rng([self.seed, epoch, slot, _SUBSTITUTE])
        while (row := int(numbers.integers(self.rows))) in self.quarantined:
            pass
        return row
