"""Batches of an evaluation set: every row once, dealt over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from resilient_train.data.rows import Collate
from resilient_train.data.samples import Slicing, loader
from resilient_train.data.stream import Key

Weighted = tuple[Any, int]  # a batch and the number of its rows; 0 for a batch that only keeps ranks in step


class MapEvaluation:
    """Evaluation over a map-style data set, in order, with the same random numbers every time."""

    def __init__(self, dataset: Any, slicing: Slicing, *, seed: int, collate: Collate, num_workers: int) -> None:
        keys = [Key(seed, 0, index) for index in range(len(dataset))]
        self._plan, self._weights = _deal(_chunks(keys, slicing.batch_size), slicing)
        self._loader = loader(dataset, self._plan, collate, num_workers=num_workers, pin_memory=False)

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[Weighted]:
        return zip(self._loader, self._weights, strict=True)


class IterableEvaluation:
    """Evaluation over an iterable data set: every rank reads all of it and works on its share."""

    def __init__(self, dataset: Any, slicing: Slicing, *, collate: Collate) -> None:
        self.dataset, self.slicing, self.collate = dataset, slicing, collate

    def __iter__(self) -> Iterator[Weighted]:
        rows = iter(self.dataset)
        while group := list(islice(rows, self.slicing.batch_size * self.slicing.world)):
            batches, weights = _deal(_chunks(group, self.slicing.batch_size), self.slicing)
            for batch, weight in zip(batches, weights, strict=True):
                yield self.collate(list(batch)), weight


def _chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _deal(batches: list[Sequence[Any]], slicing: Slicing) -> tuple[list[Sequence[Any]], list[int]]:
    """Give every rank the same number of batches: a forward with collectives hangs when one rank has fewer."""
    mine = batches[slicing.rank :: slicing.world]
    weights = [len(batch) for batch in mine]
    if len(mine) < -(-len(batches) // slicing.world):
        mine, weights = [*mine, batches[0]], [*weights, 0]
    return mine, weights
