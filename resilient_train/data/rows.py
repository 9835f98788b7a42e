"""Rows that come out the same every time they are fetched, random numbers included, and the identity of a data set."""

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

    Seeding three generators for every row costs more than many a row, and most data sets draw no random numbers. So
    if the first batch draws none, rows are fetched without seeding until a batch draws after all. That batch is
    fetched again, and from then on every row is seeded. The process's generators are left in any state: each update
    seeds them afterwards.
    """

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset, self.collate = dataset, collate
        self._draws: bool | None = None  # unknown before the first batch
        self._probe: _Probe | None = None

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        """Return a list of one batch: torch's fetcher asks for a list of rows and collates it."""
        return [self.collated(keys)]

    def collated(self, keys: Sequence[Key]) -> Any:
        """Make one micro-batch."""
        if self._draws is None:
            return self._first(keys)
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

    def _first(self, keys: Sequence[Key]) -> Any:
        """Make the first batch with its random numbers, and find out whether it draws any: it is fetched only once."""
        rows, self._draws = [], False
        for key in keys:
            probe = _Probe(mix(Purpose.ROW, *key))
            seed_host(probe.seed)
            rows.append(self.dataset[key.row])
            self._draws |= not probe.is_untouched()
        probe = _Probe(mix(Purpose.COLLATE, *keys[0]))
        seed_host(probe.seed)
        batch = self.collate(rows)
        self._draws |= not probe.is_untouched()
        return batch

    def fetch(self, key: Key) -> Any:
        """Fetch one row, in the way in which a batch is fetched."""
        seed_host(mix(Purpose.ROW, *key))
        return self.dataset[key.row] if self._draws is not False else self._plain([key])[0]

    def _plain(self, keys: Sequence[Key]) -> list[Any]:
        rows = [key.row for key in keys]
        fetch_many = getattr(self.dataset, "__getitems__", None)
        return list(fetch_many(rows)) if fetch_many else [self.dataset[row] for row in rows]


class _Probe:
    """Says whether numbers were drawn from the generators since they were seeded."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        seed_host(seed)
        self.first = random.random(), np.random.random()
        self.state = torch.get_rng_state()

    def is_untouched(self) -> bool:
        """Draw once more: the numbers are the first ones after the seed only if none were drawn before."""
        return (random.random(), np.random.random()) == self.first and torch.equal(torch.get_rng_state(), self.state)


_COMPARED = 8  # rows, spread over the data set
_LASTING = (torch.Tensor, bool, int, float, complex, str, bytes, type(None))


def fingerprint(dataset: Any) -> dict[str, Any]:
    """Return the class of a map-style data set, its number of rows, and digests of a few."""
    rows = len(dataset)
    compared = {(rows - 1) * number // (_COMPARED - 1) for number in range(_COMPARED)}
    return {"dataset": type(dataset).__name__, "rows": rows, "digests": _digests(dataset, compared)}


def sampled(dataset: Any, rows: Iterable[int]) -> dict[str, Any]:
    """Return the data set's number of rows and digests of some of these, to compare with when the run resumes.

    They are rows that training has fetched already: other rows might end the process, or never return.
    """
    some = sorted(set(rows))
    compared = {some[len(some) * number // _COMPARED] for number in range(_COMPARED)} if some else set()
    digests = {row: digest and digest[:16] for row, digest in _digests(dataset, compared).items()}
    return {"rows": len(dataset), "digests": digests}


def change(known: Mapping[str, Any], dataset: Any) -> str:
    """Say how a data set differs from an earlier sample of it; empty if it does not."""
    if len(dataset) != known["rows"]:
        return f"it has {len(dataset):,} rows, and had {known['rows']:,}"
    now = sampled(dataset, map(int, known["digests"]))["digests"]
    odd = [row for row, was in known["digests"].items() if was and now.get(row) and now[row] != was]
    return f"row {min(odd, key=int)} is not what it was" if odd else ""


def _digests(dataset: Any, rows: Iterable[int]) -> dict[str, str | None]:
    """Hash rows, each fetched twice. The digest of a row that raises, or that differs the second time, is None."""
    digests: dict[str, str | None] = {}
    with preserved(torch.device("cpu")):
        for row in sorted(rows):
            seen: set[str | None] = set()
            for _ in range(2):
                seed_host(mix(Purpose.ROW, 0, 0, row))
                try:
                    seen.add(sha256(_lasting(dataset[row])))
                except Exception:
                    seen.add(None)
            digests[str(row)] = seen.pop() if len(seen) == 1 else None
    return digests


def _lasting(node: Any) -> Any:
    """Return what is the same in the next process: the data of a row, but only the class of other objects."""
    if isinstance(node, Mapping):
        return {str(key): _lasting(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_lasting(value) for value in node]
    if isinstance(node, np.generic):
        return _lasting(node.item())
    if isinstance(node, _LASTING) or (isinstance(node, np.ndarray) and not node.dtype.hasobject):
        return node
    return type(node).__name__
