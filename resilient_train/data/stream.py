"""The endless stream of samples: perm(seed, 0), then perm(seed, 1), and so on without end.

Everything here is arithmetic on positions. A position counts samples, never batches, so it means the same
for any number of processes, workers and micro-batches, and jumping to one costs no more than its epoch's order.
Whoever changes that order raises the format of checkpoints: a position in them would mean other rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import cycle, repeat
from typing import NamedTuple

import numpy as np

_OTHERS = 2  # numbers drawn for one purpose are independent of those for another. Permutations have no such mark


class Key(NamedTuple):
    """Identifies a sample: enough to fetch it again with the same random numbers."""

    seed: int
    epoch: int
    row: int


class Ranges(list[list[int]]):
    """Ranges `[start, stop)` of positions, in the order in which they were added; they may overlap."""

    def outside(self, at: int, count: int) -> list[tuple[int, int]]:
        """Return the first `count` positions from `at` on that are in no range, as spans."""
        found = []
        for low, high in sorted(one for one in self if one[1] > at):
            end = min(low, at + count)
            if end > at:
                found.append((at, end))
                count -= end - at
            if not count:
                return found
            at = max(at, high)
        return [*found, (at, at + count)]

    def end_at(self, at: int) -> int:
        return self.outside(at, 1)[0][0]


class Stream:
    """An endless stream over `rows` rows. Skipped ranges and quarantined rows are remedies: they do not rewind."""

    def __init__(self, rows: int, seed: int, *, shuffle: bool = True) -> None:
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.skipped = Ranges()
        self.quarantined: set[int] = set()
        self._order = lru_cache(maxsize=2)(self._rows_of)  # most updates span at most two epochs

    def take(self, position: int, count: int) -> tuple[int, int, list[Key]]:
        """Return the samples of an update from a position on: where the first is, where the last ends, and all keys."""
        spans = self.skipped.outside(position, count)
        return spans[0][0], spans[-1][1], [key for span in spans for key in self.keys(*span)]

    def quarantine(self, rows: Iterable[int]) -> None:
        """Replace these rows by healthy ones from now on. All other places of the stream stay as they were."""
        new = {int(row) for row in rows} - self.quarantined
        if len(self.quarantined) + len(new) == self.rows:
            raise ValueError(f"all {self.rows} rows would be in quarantine: nothing is left to train on")
        self.quarantined |= new

    def others(self, keys: Sequence[Key], draw: int, *, without: Collection[int] = ()) -> list[Key]:
        """Return as many keys of other healthy rows, each in the epoch of the key in its place. Rows repeat, or are of
        `keys`, only if too few are left; none is in quarantine or in `without`, so the list may be empty.
        """
        left_out = self.quarantined.union(without)
        with_these = left_out.union(key.row for key in keys)
        left_out = with_these if len(with_these) < self.rows else left_out
        left = self.rows - len(left_out)
        origin = [number for key in keys for number in (key.epoch, key.row)]
        numbers = np.random.default_rng([self.seed, draw, *origin, _OTHERS])
        others: dict[int, None] = {}
        while len(others) < min(len(keys), left):
            row = int(numbers.integers(self.rows))
            if row not in left_out:
                others[row] = None
        return [Key(self.seed, key.epoch, row) for key, row in zip(keys, cycle(others), strict=False)]

    def keys(self, start: int, stop: int) -> list[Key]:
        keys: list[Key] = []
        while start < stop:
            epoch, slot = divmod(start, self.rows)
            rows = list(map(int, self._order(epoch)[slot : slot + stop - start]))
            some = map(Key, repeat(self.seed), repeat(epoch), rows)
            bad = self.quarantined
            keys += [self.others([key], at)[0] if key.row in bad else key for at, key in enumerate(some, slot)]
            start += len(rows)
        return keys

    def _rows_of(self, epoch: int) -> Sequence[int] | np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.rows) if self.shuffle else range(self.rows)
