"""Which rows of a batch did it: by trying parts of it with other rows in place of the rest, and by their values."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import SequenceKey, tree_flatten_with_path

from resilient_train.state.tree import leaves, with_dicts
from resilient_train.types import Facts, fact

MOST_TRIALS = 200  # of a search; a batch of 1,024 with three guilty rows takes 60
OTHERS = 128  # rows that a row is compared with
ENOUGH = 16  # other rows, with fewer of which nothing is said of a small number
_FAR_BELOW = 1e3  # times: what divides by so small a number, or takes its logarithm, is far out
_WIDTHS = 4.0  # of the range in which nearly all others are: what is as far from it is no tail
_NARROW = 2.0  # the ends of that range, one by the other
_COLUMNS = 1_000  # of a field that is searched column by column
_OUT_OF_SCALE = 1e3  # times the median of the columns
_LARGE = 30.0  # the size of half of the columns: first weights are made for inputs of about 1
_FEW_COLUMNS = 10_000  # of pictures no number is given
_MANY = 0.5  # of a batch: where as many rows are guilty it is not the rows


def guilty(count: int) -> Generator[Sequence[int], bool, tuple[int, ...]]:
    """Find the places of a batch of `count` rows each of which breaks a batch that is healthy otherwise.

    It asks for trials: yields places, and is sent whether a batch breaks that keeps the rows there and has others in
    all other places. Nothing is returned where no part of the batch does it alone, or where most of it does.
    """
    if count == 1:
        return (0,) if (yield [0]) else ()
    found: list[int] = []
    waiting = [list(range(count))]
    trials = 0
    while waiting:
        places = waiting.pop()
        if len(places) == 1:
            found.append(places[0])
            continue
        middle, parts = len(places) // 2, []
        for part in (places[:middle], places[middle:]):
            if (yield part):
                parts.append(part)
        trials += 2
        if trials > MOST_TRIALS or len(found) > _MANY * count:
            return ()
        waiting += reversed(parts)
    return tuple(sorted(found)) if 0 < len(found) <= max(1, _MANY * count) else ()


def nonfinite_fields(row: Any) -> Facts:
    """Name the fields of a row that hold values that are not finite, and where: `element 0 at [3, 17] is NaN`."""
    found: Facts = ()
    for name, values in _fields(row):
        if bool(values.isfinite().all()):
            continue
        first, *more = (tuple(place) for place in (~values.isfinite()).nonzero().tolist())
        value = f"{float(values[first]):g}".replace("nan", "NaN")
        found += fact("row_not_finite", field=name, at=[*first], value=value, more=len(more))
    return found


def outlying_fields(row: Any, others: Sequence[Any], far: float) -> Facts:
    """Name fields of a row that lie `far` times beyond those of others, far nearer to 0, or out of a narrow range."""
    found: Facts = ()
    usual, numbers, mine = [_sizes(other) for other in others], [_numbers(other) for other in others], _numbers(row)
    for field, size in _sizes(row).items():
        theirs = sorted(one[field] for one in usual if field in one and math.isfinite(one[field]))
        if not theirs or not math.isfinite(size):  # nonfinite_fields names what is not finite
            continue
        middle, largest = theirs[len(theirs) // 2], theirs[-1]
        # Where the others are all 0 it may be a rare class, marked with 1, or a count: that it is not 0 says nothing.
        if not size <= far * (max(largest, 2 * middle) or 1.0):
            found += fact("row_far", **_largest_of(row, field), others=len(theirs), usual=largest)
            continue
        # A single number that is always positive, such as a chance or a deviation: losses divide by those.
        known = sorted(one[field] for one in numbers if field in one)
        lowest = known[len(known) // 16] if len(known) >= ENOUGH and known[0] > 0 else 0.0
        if 0 < mine.get(field, 0.0) * max(far, _FAR_BELOW) < lowest:
            found += fact("row_near_zero", **_largest_of(row, field), others=len(known), usual=lowest)
    return found or _out_of_narrow(row, others, far)


def _out_of_narrow(row: Any, others: Sequence[Any], far: float) -> Facts:
    """Name fields of a row, or columns, that are far out of a range that is narrow for numbers so far from 0.

    Not those that are less than `far` times the largest of it: quantities grow large now and then, as prices do. And
    not 0: the line that cannot take it is to blame.
    """
    theirs: dict[str, list[torch.Tensor]] = {}
    for other in others:
        for field, values in _fields(other):
            theirs.setdefault(field, []).append(values)
    found: Facts = ()
    for field, values in _fields(row):
        same = [one for one in theirs.get(field, []) if one.shape == values.shape]
        if len(same) < ENOUGH or values.dim() > 1 or values.numel() > _COLUMNS or values.is_complex():
            continue
        by_size = torch.stack(same).double().reshape(len(same), -1).sort(0).values
        low, high = by_size[len(same) // 16], by_size[-1 - len(same) // 16]
        is_narrow = (low * high > 0) & (torch.maximum(low / high, high / low) <= _NARROW) & (high > low)
        mine, largest = values.double().flatten(), torch.maximum(low.abs(), high.abs())
        is_tail = (mine * high > 0) & (mine.abs() > largest) & (mine.abs() <= far * largest)
        odd = (
            is_narrow
            & ~is_tail
            & mine.isfinite()
            & (mine != 0)
            & (torch.maximum(low - mine, mine - high) > _WIDTHS * (high - low))
        )
        for place in odd.nonzero().flatten().tolist()[:1]:
            usual = {"others": len(same), "low": float(low[place]), "high": float(high[place])}
            at = [place] if values.dim() else []
            found += fact("row_out_of_range", field=field, at=at, value=float(mine[place]), **usual)
    return found


def usual_sizes(rows: Sequence[Any]) -> dict[str, float]:
    """What three of four rows do not exceed, field by field; no fields that are mostly zero."""
    fields: dict[str, list[float]] = {}
    for row in rows:
        for field, size in _sizes(row).items():
            if math.isfinite(size):
                fields.setdefault(field, []).append(size)
    quartiles = {field: sorted(some)[3 * len(some) // 4] for field, some in fields.items() if 2 * len(some) > len(rows)}
    return {field: size for field, size in quartiles.items() if size > 0}


def far_above(row: Any, usual: dict[str, float], times: float) -> Facts:
    """Say which field of a row is so many times its usual size; empty where none is."""
    for field, size in _sizes(row).items():
        if field in usual and size > times * usual[field]:
            return fact("row_above_most", **_largest_of(row, field), usual=usual[field])
    return ()


def _largest_of(row: Any, field: str) -> dict[str, Any]:
    """Return the largest value of a field, and its place."""
    values = next(values for name, values in _fields(row) if name == field)
    place = tuple(int(one) for one in torch.unravel_index(values.abs().argmax(), values.shape))
    value = values[place]
    return {"field": field, "at": [*place], "value": float(value.abs() if value.is_complex() else value)}


def out_of_scale(batch: Any) -> Facts:
    """Advise to normalise inputs some of whose columns are far larger than others, or all are large; else empty."""
    large: Facts = ()
    for name, values in _fields(batch):
        if values.dim() < 2 or not len(values):
            continue
        columns = values.flatten(1).abs().nan_to_num(0.0, 0.0, 0.0).double().mean(0)
        sizes = columns[columns > 0]
        if len(sizes) < 2:
            continue
        size, usual = float(sizes.max()), float(sizes.median())
        if size > _OUT_OF_SCALE * usual:
            what = f"column {int(columns.argmax())}" if len(columns) <= _FEW_COLUMNS else "a part"
            return fact("inputs_out_of_scale", what=what, field=name, size=size, usual=usual, columns=len(columns))
        if usual > _LARGE and 2 * len(sizes) > len(columns):
            large = large or fact("inputs_large", field=name, usual=usual, columns=len(sizes))
    return large


def largest(batches: Sequence[Any]) -> torch.Tensor:
    """The largest absolute value of each field, over batches of one shape; nothing waits for the device."""
    fields = zip(*map(leaves, batches), strict=False)
    tensors = [some for some in fields if all(isinstance(one, torch.Tensor) for one in some)]
    sizes = [
        torch.stack([one.detach().abs().amax().float() for one in some])
        for some in tensors
        if all(one.is_floating_point() and one.numel() for one in some)
    ]
    return torch.stack([one.amax() for one in sizes]) if sizes else torch.empty(0)


def _numbers(row: Any) -> dict[str, float]:
    """The fields of a row that are single numbers, and finite."""
    single = {name: values.item() for name, values in _fields(row) if values.numel() == 1 and not values.is_complex()}
    return {name: value for name, value in single.items() if math.isfinite(value)}


def _sizes(row: Any) -> dict[str, float]:
    return {name: float(values.abs().max()) for name, values in _fields(row) if values.numel()}


def _fields(row: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The fields of a row that hold numbers with a fraction, by their place in it."""
    for path, leaf in tree_flatten_with_path(with_dicts(row))[0]:
        if isinstance(leaf, float):
            leaf = torch.tensor(leaf, dtype=torch.float64)
        elif hasattr(leaf, "__array__") and not isinstance(leaf, torch.Tensor):
            try:
                leaf = torch.as_tensor(leaf)
            except (TypeError, ValueError):
                continue
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            match path:
                case [SequenceKey(idx=number)]:
                    name = f"element {number}"
                case _:
                    name = "".join(map(str, path)) or "its value"
            yield name, leaf.detach()
