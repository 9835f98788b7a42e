"""What a data set is known by again: to lists of its rows that outlive a process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from resilient_train.state.randomness import Purpose, mix, preserved, seed_host
from resilient_train.state.tree import sha256

_LOOKED_AT = 8  # rows, spread over the data set
_LASTING = (torch.Tensor, bool, int, float, complex, str, bytes, type(None))


def fingerprint(dataset: Any) -> dict[str, Any]:
    """Return a map-style data set's class, its number of rows, and digests of a few: `{"dataset", "rows", "digests"}`.

    A digest is None, and nothing to go by, where a row raises or is another one every time it is fetched.
    """
    rows = len(dataset)
    last = rows - 1
    looked_at = sorted({last * number // (_LOOKED_AT - 1) for number in range(_LOOKED_AT)})
    with preserved(torch.device("cpu")):
        digests = {str(row): _digest(dataset, row) for row in looked_at}
    return {"dataset": type(dataset).__name__, "rows": rows, "digests": digests}


def sampled(dataset: Any, rows: Iterable[int]) -> dict[str, Any]:
    """Return what a data set is compared with when the run resumes: its number of rows, and digests of these.

    They are rows that training has fetched already: to read others might end the process, or never come back.
    """
    some = sorted(set(rows))
    looked_at = {some[len(some) * number // _LOOKED_AT] for number in range(_LOOKED_AT)} if some else set()
    with preserved(torch.device("cpu")):
        digests = {str(row): (_digest(dataset, row) or "")[:16] or None for row in sorted(looked_at)}
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
    """What of a row is the same in the next process: of other objects than data only their class."""
    if isinstance(node, Mapping):
        return {str(key): _lasting(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_lasting(value) for value in node]
    if isinstance(node, np.generic):
        return _lasting(node.item())
    if isinstance(node, _LASTING) or (isinstance(node, np.ndarray) and not node.dtype.hasobject):
        return node
    return type(node).__name__
