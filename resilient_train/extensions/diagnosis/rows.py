"""Which rows of a batch did it: by trying parts of it with other rows in place of the rest, and by their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import SequenceKey, tree_flatten_with_path

from resilient_train.core.tree import with_dicts
from resilient_train.ground.types import Facts, fact

MOST_TRIALS = 200  # of a search; a batch of 1,024 with three guilty rows takes 60
OTHERS = 128  # rows that a row is compared with
ENOUGH = 16  # other rows, with fewer of which nothing is said of a small number
_FAR_BELOW = 1e3  # times: what divides by so small a number, or takes its logarithm, is far out
_NEARER = 3.0  # times, in orders of magnitude, to what is far out than to what is usual: as far out
_MANY = 0.5  # of a batch: where as many rows are guilty it is not the rows


def guilty(count: int, breaks: Callable[[Sequence[int]], bool]) -> tuple[int, ...]:
    """Find the places of a batch of `count` rows each of which breaks a batch that is healthy otherwise.

    `breaks` tries a batch that keeps the rows of these places and has others in all other places. Nothing is returned
    where no part of the batch does it alone, or where most of it does.
    """
    if count == 1:
        return (0,) if breaks([0]) else ()
    found: list[int] = []
    waiting = [list(range(count))] if count else []
    trials = 0
    while waiting:
        places = waiting.pop()
        if len(places) == 1:
            found += places
            continue
        middle = len(places) // 2
        waiting += reversed([part for part in (places[:middle], places[middle:]) if breaks(part)])
        trials += 2
        if trials > MOST_TRIALS or len(found) > _MANY * count:
            return ()
    return tuple(sorted(found)) if len(found) <= max(1, _MANY * count) else ()


def nonfinite_fields(row: Any) -> Facts:
    """Name the fields of a row that hold values that are not finite, and where: `element 0 at [3, 17] is NaN`."""
    found: Facts = ()
    for name, values in _fields(row):
        for place in (bad := (~values.isfinite()).nonzero().tolist())[:1]:
            value = f"{_at(place, values):g}".replace("nan", "NaN")
            found += fact("row_not_finite", field=name, at=place, value=value, more=len(bad) - 1)
    return found


def outlying_fields(row: Any, others: Sequence[Any], far: float) -> Facts:
    """Name the fields of a row that lie `far` times beyond those of others, and numbers that are far below theirs."""
    theirs = [dict(_fields(other)) for other in others]
    found: Facts = ()
    for field, mine in _fields(row):
        size, sizes = _size(mine), sorted(filter(math.isfinite, (_size(one[field]) for one in theirs if field in one)))
        if not sizes or not math.isfinite(size):  # nonfinite_fields names what is not finite
            continue
        # Where the others are all 0 it may be a rare class, marked with 1, or a count: that it is not 0 says nothing.
        if size > far * (max(sizes[-1], 2 * sizes[len(sizes) // 2]) or 1.0):
            found += fact("row_far", **_largest_of(field, mine), others=len(sizes), usual=sizes[-1])
        # A chance or a deviation is never 0, and losses divide by it. Not 0: the line that cannot take it is to blame.
        elif mine.numel() == 1 and len(sizes) >= ENOUGH and sizes[0] > 0:
            usual = sizes[len(sizes) // 16]  # some of the others may be as bad
            if 0 < size * max(far, _FAR_BELOW) < usual:
                found += fact("row_far_below", **_largest_of(field, mine), others=len(sizes), usual=usual)
    return found


def alike(row: Any, marks: Sequence[Mapping[str, Any]]) -> Facts:
    """Name what a row has in common with others that are bad, by their marks: the same field is not finite, or about
    as far out.
    """
    bad = {mark["field"] for mark in marks if mark["fact"] == "row_not_finite"}
    found = tuple(one for one in nonfinite_fields(row) if one["field"] in bad)
    for field, values in _fields(row):
        found += tuple(
            {**mark, **_largest_of(field, values)}
            for mark in marks
            if mark["field"] == field and "usual" in mark and _is_as_far(_size(values), mark)
        )
    return found


def _is_as_far(size: float, mark: Mapping[str, Any]) -> bool:
    usual, out = mark["usual"] or 1.0, abs(mark["value"])
    return 0 < size < math.inf and _NEARER * abs(math.log(size / out)) < abs(math.log(size / usual))


def _largest_of(field: str, values: Tensor) -> dict[str, Any]:
    place = [int(one) for one in torch.unravel_index(values.abs().argmax(), values.shape)]
    return {"field": field, "at": place, "value": _at(place, values)}


def _at(place: Sequence[int], values: Tensor) -> float:
    value = values[tuple(place)]
    return float(value.abs() if value.is_complex() else value)


def _size(values: Tensor) -> float:
    return float(values.abs().max())


def _fields(row: Any) -> Iterator[tuple[str, Tensor]]:
    """The fields of a row that hold numbers with a fraction, by their place in it."""
    for path, leaf in tree_flatten_with_path(with_dicts(row))[0]:
        if isinstance(leaf, float):
            leaf = torch.tensor(leaf, dtype=torch.float64)
        elif hasattr(leaf, "__array__") and not isinstance(leaf, Tensor):
            try:
                leaf = torch.as_tensor(leaf)
            except (TypeError, ValueError):
                continue
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()) and leaf.numel():
            match path:
                case [SequenceKey(idx=number)]:
                    name = f"element {number}"
                case _:
                    name = "".join(map(str, path)) or "its value"
            yield name, leaf.detach()
