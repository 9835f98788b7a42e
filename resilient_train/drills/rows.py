"""Rows of the data set that are rotten, for ever: the one fault that is bound to the data."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset

from resilient_train.drills.fault import Fault, draw
from resilient_train.drills.limits import require_factor, require_list_of_whole, require_one_of, require_share
from resilient_train.drills.numbers import changed, filled, holds_floats, scaled
from resilient_train.errors import unusable
from resilient_train.state.randomness import preserved


@dataclass(frozen=True, kw_only=True)
class BadRow(Fault):
    """Some rows of the data set are not finite, or far off; they come again in every epoch and every replay."""

    name = "bad_row"
    rows: Sequence[int] = ()  # their indices
    share: float = 0.01  # of all rows, at least one, drawn from the seed; where no rows are named
    what: Literal["nan", "inf", "outlier"] = "nan"
    factor: float = 1e4  # what an outlier is multiplied by

    def __post_init__(self) -> None:
        super().__post_init__()
        require_list_of_whole("rows", self.rows, at_least=0)
        require_share("share", self.share)
        require_one_of("what", self.what, ("nan", "inf", "outlier"))
        require_factor("factor", self.factor)
        if not self.rows and not self.share:
            raise unusable("rows", "no row would be bad: name some, such as [17], or a share above 0")
        object.__setattr__(self, "rows", tuple(self.rows))

    def chosen(self, count: int) -> frozenset[int]:
        """Return the indices of the bad rows among `count`."""
        if self.rows:
            return frozenset(self.rows)
        wanted = min(count, max(1, round(self.share * count)))
        return frozenset(random.Random(draw(self.name, self.seed)).sample(range(count), wanted))

    def lacks(self, *things: Any) -> str | None:
        (dataset,) = things
        kind = type(dataset)
        # A torch IterableDataset inherits a __getitem__ that only raises.
        if isinstance(dataset, IterableDataset) or not (hasattr(kind, "__getitem__") and hasattr(kind, "__len__")):
            return f"only rows of a map-style data set can rot, and a {kind.__name__} is read from front to back"
        chosen = self.chosen(len(dataset))
        if max(chosen) >= len(dataset):
            return f"there is no row {max(chosen)}: the data set has {len(dataset)}"
        with preserved(torch.device("cpu")):  # an augmentation may draw
            row = dataset[min(chosen)]
        if holds_floats(row):
            return None
        return "the rows hold no floating-point numbers: bad_row needs some; use inf_loss or nan_grad"

    def spoil(self, row: Any) -> Any:
        return changed(row, scaled(self.factor) if self.what == "outlier" else filled(float(self.what)))


def rotten(dataset: Any, fault: BadRow) -> Any:
    """Return the data set as it looks with the fault's rows rotten; nothing in the data set itself changes."""
    kind = _RottenInBatches if hasattr(dataset, "__getitems__") else _Rotten
    return kind(dataset, fault)


class _Rotten:
    """A data set like the one inside, but for some rows."""

    def __init__(self, dataset: Any, fault: BadRow) -> None:
        self.dataset, self.fault = dataset, fault
        self.rows = fault.chosen(len(dataset))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self._as_it_looks(index, self.dataset[index])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:  # unpickled in a worker, it has no attributes yet
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def _as_it_looks(self, index: int, row: Any) -> Any:
        place = operator.index(index)
        return self.fault.spoil(row) if (place + len(self) if place < 0 else place) in self.rows else row


class _RottenInBatches(_Rotten):
    """The same for a data set that fetches many rows at once."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        rows = self.dataset.__getitems__(indices)
        return [self._as_it_looks(index, row) for index, row in zip(indices, rows, strict=True)]
