"""A keyed permutation: any part of the order of an epoch, of any size, without the rest of it.

A shuffled array of 10^9 rows takes 8 GB in each process, and a minute where an epoch begins. This is a Feistel network
over pairs `(left, right)` with `row = left + right * width`: each round adds a keyed hash of one half to the other,
modulo its size, which can be undone and is therefore a permutation of all pairs. The pairs are at least as many as the
rows: a result that is no row is permuted again until it is one, which happens about once in sqrt(rows) times.
"""

from __future__ import annotations

import math

import numpy as np

AT_ONCE = 2**13  # rows that numpy permutes whole, in less time than the rounds below take for some of them

# Of the order of more rows. Checkpoints hold it: the same position means other rows if the order changes.
VERSION = 2

_ROUNDS = 8  # 4 are known to look random
_MIX = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))  # the finalizer of MurmurHash3
_SHIFT, _HALF = np.uint64(33), np.uint64(32)


def permuted(start: int, stop: int, rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return places `[start, stop)` of the order that `rows` rows have in this epoch."""
    if rows <= AT_ONCE:
        return np.random.default_rng([seed, epoch]).permutation(rows)[start:stop]
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
    width = math.isqrt(rows - 1) + 1
    sizes = np.uint64(width), np.uint64(-(-rows // width))
    numbers = _once(np.arange(start, stop, dtype=np.uint64), sizes, keys)
    while (outside := numbers >= rows).any():
        numbers[outside] = _once(numbers[outside], sizes, keys)
    return numbers


def _once(numbers: np.ndarray, sizes: tuple[np.uint64, np.uint64], keys: np.ndarray) -> np.ndarray:
    """Permute numbers below the product of both sizes."""
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
