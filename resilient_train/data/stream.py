"""The endless stream of samples: perm(seed, 0), then perm(seed, 1), and so on without end.

Everything here is arithmetic on positions. A position counts samples, never batches, so it means the same
for any number of processes, workers and micro-batches, and jumping to one costs nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

import numpy as np

_AT_ONCE = 2**13  # rows that numpy permutes whole, in less time than the rounds below take for some of them

# Whoever changes the order raises the format of checkpoints: a position in them would mean other rows.
_ROUNDS = 8  # 4 are known to look random
_MIX = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))  # the finalizer of MurmurHash3
_SHIFT, _HALF = np.uint64(33), np.uint64(32)


def permuted(start: int, stop: int, rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return places `[start, stop)` of the order that `rows` rows have in this epoch."""
    if rows <= _AT_ONCE:
        return np.random.default_rng([seed, epoch]).permutation(rows)[start:stop]
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
    width = math.isqrt(rows - 1) + 1
    sizes = np.uint64(width), np.uint64(-(-rows // width))
    numbers = _once(np.arange(start, stop, dtype=np.uint64), sizes, keys)
    while (outside := numbers >= rows).any():
        numbers[outside] = _once(numbers[outside], sizes, keys)
    return numbers


def _once(numbers: np.ndarray, sizes: tuple[np.uint64, np.uint64], keys: np.ndarray) -> np.ndarray:
    halves = [numbers % sizes[0], numbers // sizes[0]]
    for index, key in enumerate(keys):
        changed, other = index % 2, 1 - index % 2
        hashed = halves[other] + key
        for mix in _MIX:
            hashed = (hashed ^ (hashed >> _SHIFT)) * mix
        size = sizes[changed]
        moved = halves[changed] + (((hashed >> _HALF) * size) >> _HALF)  # less than twice the size
        halves[changed] = np.where(moved < size, moved, moved - size)
    return halves[0] + halves[1] * sizes[0]


# Places of an epoch whose rows are computed together: one by one they would cost a small update 5 % of its time.
_BLOCK = _AT_ONCE

_SUBSTITUTE = 1  # numbers drawn for one purpose are independent of those for another. Permutations have no such mark
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
    """Ranges `[start, stop)` of positions: as they were `added`, and as sorted `spans`, merged where they touch."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.added: list[list[int]] = []

    def add(self, start: int, stop: int) -> None:
        if not 0 <= start < stop:
            raise ValueError(f"cannot skip [{start}, {stop}): a range needs 0 <= start < stop")
        first = bisect_left(self.spans, start, key=itemgetter(1))
        last = bisect_right(self.spans, stop, key=itemgetter(0))
        touched = self.spans[first:last]
        merged = (min(start, touched[0][0]), max(stop, touched[-1][1])) if touched else (start, stop)
        self.spans[first:last] = [merged]
        self.added.append([start, stop])

    def outside(self, at: int, count: int) -> list[tuple[int, int]]:
        """Return the first `count` positions from `at` on that are in no range, as spans."""
        found = []
        place = bisect_right(self.spans, at, key=itemgetter(1))  # the first that ends after it
        while count and place < len(self.spans):
            low, high = self.spans[place]
            end = min(low, at + count)
            if end > at:
                found.append((at, end))
                count -= end - at
            at, place = high, place + 1
        return [*found, (at, at + count)] if count else found

    def end_at(self, at: int) -> int:
        return self.outside(at, 1)[0][0]


class Stream:
    """An endless stream over `rows` rows. Skipped ranges and quarantined rows are remedies: they do not rewind."""

    def __init__(self, rows: int, seed: int, *, shuffle: bool = True) -> None:
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.skipped = Ranges()
        self.quarantined: set[int] = set()
        self._order = lru_cache(maxsize=2)(self._rows_of)  # most updates span at most two blocks

    def take(self, position: int, count: int) -> Span:
        spans = self.skipped.outside(position, count)
        return Span(spans[0][0], spans[-1][1], [key for span in spans for key in self.keys(*span)])

    def quarantine(self, rows: Iterable[int]) -> None:
        """Replace these rows by healthy ones from now on. All other places of the stream stay as they were."""
        new = {int(row) for row in rows} - self.quarantined
        if any(not 0 <= row < self.rows for row in new):
            raise ValueError(f"a quarantined row lies outside of 0..{self.rows - 1}")
        if len(self.quarantined) + len(new) == self.rows:
            raise ValueError(f"all {self.rows} rows would be in quarantine: nothing is left to train on")
        self.quarantined |= new

    def others(self, keys: Sequence[Key], draw: int, *, without: Collection[int] = ()) -> list[Key]:
        """Return as many keys of other healthy rows, each in the epoch of the key in its place. Rows repeat, or are of
        `keys`, only if too few are left; none is in quarantine or in `without`, so the list may be empty.
        """
        healthy = self.rows - len(self.quarantined)
        left_out = {*without} - self.quarantined
        if len(with_these := left_out.union(key.row for key in keys) - self.quarantined) < healthy:
            left_out = with_these
        if not (left := healthy - len(left_out)):
            return []
        origin = [number for key in keys for number in (key.epoch, key.row)]
        numbers = np.random.default_rng([self.seed, draw, *origin, _OTHERS])
        others: list[Key] = []
        used: set[int] = set()
        while len(others) < len(keys):
            row = int(numbers.integers(self.rows))
            if row not in left_out and row not in used and row not in self.quarantined:
                others.append(Key(self.seed, keys[len(others)].epoch, row))
                used.add(row)
                if len(used) == left:
                    used.clear()
        return others

    def keys(self, start: int, stop: int) -> list[Key]:
        keys: list[Key] = []
        while start < stop:
            epoch, slot = divmod(start, self.rows)
            block, first = divmod(slot, _BLOCK)
            rows = self._order(epoch, block)[first : first + stop - start]
            if not self.quarantined.isdisjoint(rows):
                bad = self.quarantined
                rows = [self._substitute(epoch, slot + at) if row in bad else row for at, row in enumerate(rows)]
            keys += map(Key, repeat(self.seed), repeat(epoch), rows)
            start += len(rows)
        return keys

    def _rows_of(self, epoch: int, block: int) -> list[int]:
        start, stop = block * _BLOCK, min(self.rows, (block + 1) * _BLOCK)
        if not self.shuffle:
            return list(range(start, stop))
        order: list[int] = permuted(start, stop, self.rows, self.seed, epoch).tolist()
        return order

    def _substitute(self, epoch: int, slot: int) -> int:
        numbers = np.random.default_rng([self.seed, epoch, slot, _SUBSTITUTE])
        while (row := int(numbers.integers(self.rows))) in self.quarantined:
            pass
        return row
