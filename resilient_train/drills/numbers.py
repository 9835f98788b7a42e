"""Spoiling the floating-point numbers in a batch or a row, whatever it is nested in, without touching the original."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from resilient_train.state.tree import rebuilt

Change = Callable[[Any], Any]


def changed(tree: Any, change: Change) -> Any:
    """Put every tensor, array and number of floating point through `change`; containers are copied on the way."""

    def visit(leaf: Any) -> Any:
        if _is_floating(leaf):
            return change(leaf)
        if isinstance(leaf, Mapping):
            return {key: changed(value, change) for key, value in leaf.items()}
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            twin = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                object.__setattr__(twin, field.name, changed(getattr(leaf, field.name), change))  # frozen or not
            return twin
        return leaf

    return rebuilt(tree, visit)


def holds_floats(tree: Any) -> bool:
    """Say whether there is a floating-point number anywhere in it."""
    found: list[Any] = []
    changed(tree, found.append)
    return bool(found)


def filled(value: float) -> Change:
    """Return the change of every number into `value`."""

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.full_like(leaf, value, requires_grad=False)
        return np.full_like(leaf, value) if isinstance(leaf, np.ndarray) else type(leaf)(value)

    return fill


def first_row_filled(value: float) -> Change:
    """Return the change of the first row of everything into `value`."""

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor | np.ndarray) or leaf.ndim == 0:
            return filled(value)(leaf)
        spoiled = leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy()
        spoiled[:1] = value
        return spoiled

    return fill


def scaled(factor: float) -> Change:
    """Return the multiplication of every number by `factor`, in its own type."""

    def scale(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf * factor
        return (leaf * factor).astype(leaf.dtype) if isinstance(leaf, np.ndarray) else type(leaf)(leaf * factor)

    return scale


def _is_floating(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.is_floating_point()
    if isinstance(leaf, np.ndarray):
        return bool(np.issubdtype(leaf.dtype, np.floating))
    return isinstance(leaf, float | np.floating)
