"""What a data set is known by again: to lists of its rows that outlive a process."""

from __future__ import annotations

from collections.abc import Mapping
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
