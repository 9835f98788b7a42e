"""Which rows of a batch did it: by trying parts of it with other rows in place of the rest, and by their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path

from resilient_train.state.tree import leaves, with_dicts

MOST_TRIALS = 200  # of a search; a batch of 1,024 with three guilty rows takes 60
_FAR_BELOW = 1e3  # times: what divides by so small a number, or takes its logarithm, is far out
_OUT_OF_SCALE = 1e3  # times the median of the columns
_LARGE = 30.0  # the size of half of the columns: first weights are made for inputs of about 1
_FEW_COLUMNS = 10_000  # of pictures no number is given
_MANY = 0.5  # of a batch: where as many rows are guilty it is not the rows


def guilty(count: int) -> Generator[Sequence[int], bool, tuple[int, ...]]:
    """Find the places of a batch of `count` rows each of which breaks a batch that is healthy otherwise.

    It asks for trials: yields places, and is sent whether a batch breaks that keeps the rows there and has others in
    all other places. Nothing is returned where no part of the batch does it alone, or where most of it does.
    """
    found: list[int] = []
    waiting = [list(range(count))]
    trials = 0
    while waiting:
        places = waiting.pop()
        if len(places) == 1:
            found.append(places[0])
            continue
        middle = len(places) // 2
        parts = []
        for part in (places[:middle], places[middle:]):
            if (yield part):
                parts.append(part)
        trials += 2
        if trials > MOST_TRIALS or len(found) > _MANY * count:
            return ()
        waiting += reversed(parts)
    return tuple(sorted(found)) if 0 < len(found) <= max(1, _MANY * count) else ()


def nonfinite_fields(row: Any) -> list[str]:
    """Name the fields of a row that hold values that are not finite, and where: `[0][3, 17] is nan`."""
    found = []
    for name, values in _fields(row):
        if bool(values.isfinite().all()):
            continue
        places = (~values.isfinite()).nonzero()
        first = tuple(places[0].tolist())
        more = f", and {len(places) - 1:,} more" if len(places) > 1 else ""
        found.append(f"{name}{_at(first)} is {float(values[first]):g}{more}")
    return found


def outlying_fields(row: Any, others: Sequence[Any], far: float) -> list[str]:
    """Name the fields of a row whose values lie `far` times beyond those of other rows, or far below them."""
    found = []
    usual = [_sizes(other) for other in others]
    for field, (least, size) in _sizes(row).items():
        theirs = sorted(one[field][1] for one in usual if field in one and math.isfinite(one[field][1]))
        if not theirs or not math.isfinite(size):  # nonfinite_fields names what is not finite
            continue
        middle, largest = theirs[len(theirs) // 2], theirs[-1]
        lowest = _lower(one[field][0] for one in usual if field in one)
        # Where the others are all 0 it may be a rare class, marked with 1, or a count: that it is not 0 says nothing.
        if not size <= far * (max(largest, 2 * middle) or 1.0):
            found.append(f"{_largest_of(row, field)}, where {len(theirs)} other rows stay within ±{largest:.3g}")
        elif 0 < least < lowest / _FAR_BELOW:
            found.append(
                f"{_least_of(row, field)}, where nearly all of {len(theirs)} other rows are {lowest:.3g} or more"
            )
    return found


def usual_sizes(rows: Sequence[Any]) -> dict[str, tuple[float, float]]:
    """What 15 of 16 rows are not below, and three of four do not exceed, by field; no fields that are mostly zero.

    The former is 0 where a row holds what is not positive.
    """
    fields: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for field, sizes in _sizes(row).items():
            fields.setdefault(field, []).append(sizes)
    usual = {
        field: (_lower(least for least, _ in some), sorted(size for _, size in some)[3 * len(some) // 4])
        for field, some in fields.items()
        if 2 * len(some) > len(rows)
    }
    return {field: (least, size) for field, (least, size) in usual.items() if 0 < size < math.inf}


def far_off(row: Any, usual: dict[str, tuple[float, float]], times: float) -> str:
    """Say which field of a row is so many times its usual size, or far below it; empty where none is."""
    for field, (least, size) in _sizes(row).items():
        lowest, highest = usual.get(field, (0.0, math.inf))
        if size > times * highest:
            return f"{_largest_of(row, field)}, where three of four other rows stay within ±{highest:.3g}"
        if 0 < least < lowest / _FAR_BELOW:
            return f"{_least_of(row, field)}, where nearly all other rows are {lowest:.3g} or more"
    return ""


def _lower(leasts: Iterable[float]) -> float:
    """What 15 of 16 rows are not below in a field that is always positive, such as a weight or a chance; else 0."""
    found = sorted(leasts)
    return found[len(found) // 16] if found and found[0] > 0 else 0.0


def _largest_of(row: Any, field: str) -> str:
    """Name the place of the largest value of a field: `[0] at [2] is -367`."""
    return _value_at(row, field, lambda values: values.abs().argmax())


def _least_of(row: Any, field: str) -> str:
    return _value_at(row, field, torch.argmin)


def _value_at(row: Any, field: str, find: Callable[[torch.Tensor], torch.Tensor]) -> str:
    values = next(values for name, values in _fields(row) if name == field)
    place = tuple(int(one) for one in torch.unravel_index(find(values), values.shape))
    value = values[place]
    return f"{field}{_at(place)} is {float(value.abs() if value.is_complex() else value):.3g}"


def _at(place: tuple[int, ...]) -> str:
    return f" at {list(place)}" if place else ""  # a single number has no place


def out_of_scale(batches: Sequence[Any]) -> str:
    """Advise to normalise inputs of which all columns are large, or some far larger than others; else empty."""
    for fields in zip(*([*_fields(one)] for one in batches), strict=False):
        name, tensors = fields[0][0], [values.flatten(1) for _, values in fields if values.dim() > 1 and len(values)]
        if not tensors or len({one.shape[1] for one in tensors}) > 1:
            continue
        columns = torch.cat([one.abs().nan_to_num(0.0, 0.0, 0.0).double() for one in tensors]).mean(0)
        sizes = columns[columns > 0]
        if len(sizes) < 2:
            continue
        size, usual = float(sizes.max()), float(sizes.median())
        place, fix = int(columns.argmax()), "normalise each column (subtract its mean, divide by its deviation)."
        if size > _OUT_OF_SCALE * usual:
            what = f"column {place} of {name}" if len(columns) <= _FEW_COLUMNS else f"a part of {name}"
            others = f"half of its {len(columns):,} columns are below {usual:.3g}"
            return f"The inputs are out of scale: {what} is about {size:.3g}, where {others}: {fix}"
        if usual > _LARGE:
            half = f"half of the {len(columns):,} columns of {name} are {usual:.3g} or more"
            return f"The inputs are large: {half}: {fix}"
    return ""


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


def _sizes(row: Any) -> dict[str, tuple[float, float]]:
    """The least value and the largest absolute value of each field; of complex numbers the former is 0."""
    return {
        name: (0.0 if values.is_complex() else float(values.min()), float(values.abs().max()))
        for name, values in _fields(row)
        if values.numel()
    }


def _fields(row: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The fields of a row that hold numbers with a fraction, by their place as one would write it after the row."""
    for path, leaf in tree_flatten_with_path(with_dicts(row))[0]:
        if isinstance(leaf, float):
            leaf = torch.tensor(leaf, dtype=torch.float64)
        elif hasattr(leaf, "__array__") and not isinstance(leaf, torch.Tensor):
            try:
                leaf = torch.as_tensor(leaf)
            except (TypeError, ValueError):
                continue
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            yield "".join(map(str, path)) or "its value", leaf.detach()
