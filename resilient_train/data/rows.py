"""Rows that come out the same every time they are fetched, random numbers included.

A row's randomness is a function of its key, so an augmentation repeats after a rewind, in another worker, and
for another number of processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from resilient_train.data.stream import Key
from resilient_train.state.randomness import mix, seed_host

Collate = Callable[[list[Any]], Any]

_COLLATE = 1  # keeps the numbers of the collate function apart from those of the first row
_PROBE = 20231  # any seed: the probe asks whether the generators still stand where it put them


class RepeatableBatches:
    """Fetches and collates the rows of one micro-batch, each with the random numbers that belong to it.

    Seeding three generators for every row costs more than many a row, and most data sets never draw. So a batch
    is first fetched as if nobody drew; if somebody did, it is fetched again row by row with the proper seeds, and
    so is every batch from then on. Leaves the process's generators anywhere: whoever trains seeds them afterwards.
    """

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset, self.collate = dataset, collate
        self._draws = False
        self._untouched: tuple[float, float, torch.Tensor] | None = None

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        """Torch's fetcher asks for a list of rows and collates it; ours holds one batch, collated already."""
        if not self._draws:
            self._place_probe()
            batch = self.collate(self._plain(keys))
            if self._probe_is_untouched():
                return [batch]
            self._draws = True
        return [self._seeded(keys)]

    def _plain(self, keys: Sequence[Key]) -> list[Any]:
        indices = [key.row for key in keys]
        many = getattr(self.dataset, "__getitems__", None)
        return list(many(indices)) if many else [self.dataset[index] for index in indices]

    def _seeded(self, keys: Sequence[Key]) -> Any:
        rows = []
        for key in keys:
            seed_host(mix(*key))
            rows.append(self.dataset[key.row])
        seed_host(mix(*keys[0], _COLLATE))
        return self.collate(rows)

    def _place_probe(self) -> None:
        seed_host(_PROBE)
        if self._untouched is None:
            self._untouched = (random.random(), np.random.random(), torch.get_rng_state())
            seed_host(_PROBE)

    def _probe_is_untouched(self) -> bool:
        """Draw once more from each generator: the number is the first after the seed only if nobody drew before."""
        assert self._untouched is not None
        python, numpy, state = self._untouched
        return random.random() == python and np.random.random() == numpy and torch.equal(torch.get_rng_state(), state)


def only(batches: list[Any]) -> Any:
    """Collate for `RepeatableBatches`, whose batches are collated already."""
    return batches[0]
