"""Spoiling the floating-point numbers in a batch or a row, whatever it is nested in, without touching the original."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

Change = Callable[[Any], Any]


def changed(tree: Any, change: Change) -> Any:
    """Put every tensor, array and number of floating point through `change`; containers are copied on the way."""
    if _is_floating(tree):
        return change(tree)
    if isinstance(tree, MutableMapping):
        twin: Any = copy.copy(tree)  # a BatchEncoding stays one
        for key, value in tree.items():
            twin[key] = changed(value, change)
        return twin
    if isinstance(tree, Mapping):
        return {key: changed(value, change) for key, value in tree.items()}
    if isinstance(tree, list):
        return [changed(value, change) for value in tree]
    if isinstance(tree, tuple):
        values = [changed(value, change) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        twin = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(twin, field.name, changed(getattr(tree, field.name), change))  # frozen or not
        return twin
    return tree


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
