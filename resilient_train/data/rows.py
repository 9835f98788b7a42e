"""Rows that come out the same every time they are fetched, random numbers included, and what a data set is known by."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from resilient_train.data.stream import Key
from resilient_train.state.randomness import Purpose, mix, preserved, seed_host
from resilient_train.state.tree import sha256

Collate = Callable[[list[Any]], Any]


class RepeatableBatches:
    """Fetches and collates the rows of one micro-batch, each with the random numbers that belong to it.

    Seeding three generators for every row costs more than many a row, and most data sets never draw. So the first
    batch is watched: if it draws no random numbers, later ones are fetched without seeding, and fetched again row by
    row if one draws after all. From the first draw on every row is seeded. Leaves the process's generators anywhere:
    each update seeds them afterwards.
    """

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset, self.collate = dataset, collate
        self._draws: bool | None = None  # not known before the first batch
        self._probe: _Probe | None = None

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        """Torch's fetcher asks for a list of rows and collates it; ours holds one batch, collated already."""
        return [self.collated(keys)]

    def collated(self, keys: Sequence[Key]) -> Any:
        """Make one micro-batch."""
        if self._draws is None:
            batch, self._draws = self._watched(keys)
            return batch
        if not self._draws:
            self._probe = self._probe or _Probe(mix(Purpose.PROBE, keys[0].seed))
            seed_host(self._probe.seed)
            batch = self.collate(self._plain(keys))
            if self._probe.is_untouched():
                return batch
            self._draws = True
        return self.of_rows([self.fetch(key) for key in keys], keys)

    def of_rows(self, rows: list[Any], keys: Sequence[Key]) -> Any:
        """Make one micro-batch of rows that were fetched one by one."""
        seed_host(mix(Purpose.COLLATE, *keys[0]))
        return self.collate(rows)

    def fetch(self, key: Key) -> Any:
        """Fetch one row, on the way that a batch would take."""
        seed_host(mix(Purpose.ROW, *key))
        return self.dataset[key.row] if self._draws is not False else self._plain([key])[0]

    def _plain(self, keys: Sequence[Key]) -> list[Any]:
        indices = [key.row for key in keys]
        many = getattr(self.dataset, "__getitems__", None)
        return list(many(indices)) if many else [self.dataset[index] for index in indices]

    def _watched(self, keys: Sequence[Key]) -> tuple[Any, bool]:
        rows: list[Any] = []
        draws = False
        for key in keys:
            probe = _Probe(mix(Purpose.ROW, *key))
            rows.append(self.dataset[key.row])
            draws = not probe.is_untouched() or draws
        probe = _Probe(mix(Purpose.COLLATE, *keys[0]))
        batch = self.collate(rows)
        return batch, not probe.is_untouched() or draws


class _Probe:
    """Seeds the generators, and says later whether numbers were drawn from them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        seed_host(seed)
        self.first = random.random(), np.random.random()
        self.state = torch.get_rng_state()
        seed_host(seed)

    def is_untouched(self) -> bool:
        """Draw once more: the numbers are the first ones after the seed only if none were drawn before."""
        return (random.random(), np.random.random()) == self.first and torch.equal(torch.get_rng_state(), self.state)


_COMPARED = 8  # rows, spread over the data set
_LASTING = (torch.Tensor, bool, int, float, complex, str, bytes, type(None))


def fingerprint(dataset: Any) -> dict[str, Any]:
    """Return a map-style data set's class, its number of rows, and digests of a few: `{"dataset", "rows", "digests"}`.

    A digest is None, and nothing to go by, where a row raises or is another one every time it is fetched.
    """
    rows = len(dataset)
    compared = sorted({(rows - 1) * number // (_COMPARED - 1) for number in range(_COMPARED)})
    with preserved(torch.device("cpu")):
        digests = {str(row): _digest(dataset, row) for row in compared}
    return {"dataset": type(dataset).__name__, "rows": rows, "digests": digests}


def sampled(dataset: Any, rows: Iterable[int]) -> dict[str, Any]:
    """Return what a data set is compared with when the run resumes: its number of rows, and digests of these.

    They are rows that training has fetched already: to read others might end the process, or never return.
    """
    some = sorted(set(rows))
    compared = {some[len(some) * number // _COMPARED] for number in range(_COMPARED)} if some else set()
    with preserved(torch.device("cpu")):
        digests = {str(row): (_digest(dataset, row) or "")[:16] or None for row in sorted(compared)}
    return {"rows": len(dataset), "digests": digests}


def change(known: Mapping[str, Any], dataset: Any) -> str:
    """Say how a data set differs from what it was when it was sampled; empty where it does not."""
    if len(dataset) != known["rows"]:
        return f"it has {len(dataset):,} rows, and had {known['rows']:,}"
    now = sampled(dataset, map(int, known["digests"]))["digests"]
    odd = [row for row, was in known["digests"].items() if was and now.get(row) and now[row] != was]
    return f"row {min(odd, key=int)} is not what it was" if odd else ""


def _digest(dataset: Any, row: int) -> str | None:
    """Hash a row, fetched twice: some data sets have a generator of their own, or read a clock."""
    digests = set()
    for _ in range(2):
        seed_host(mix(Purpose.ROW, 0, 0, row))
        try:
            digests.add(sha256(_lasting(dataset[row])))
        except Exception:
            return None
    return digests.pop() if len(digests) == 1 else None


def _lasting(node: Any) -> Any:
    """What of a row is the same in the next process: of objects other than data only their class."""
    if isinstance(node, Mapping):
        return {str(key): _lasting(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_lasting(value) for value in node]
    if isinstance(node, np.generic):
        return _lasting(node.item())
    if isinstance(node, _LASTING) or (isinstance(node, np.ndarray) and not node.dtype.hasobject):
        return node
    return type(node).__name__
