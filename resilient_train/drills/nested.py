"""Changing the floating-point numbers in a batch or a row, whatever it is nested in; the original stays as it is."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map


def changed(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every tensor, array and number of floating point; containers are copied."""

    def visit(leaf: Any) -> Any:
        if _is_floating(leaf):
            return change(leaf)
        if isinstance(leaf, MutableMapping):  # one that pytree does not know, such as a BatchEncoding
            twin: Any = copy.copy(leaf)
            twin.update({key: changed(value, change) for key, value in leaf.items()})
            return twin
        if isinstance(leaf, Mapping):
            return {key: changed(value, change) for key, value in leaf.items()}
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            twin = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                object.__setattr__(twin, field.name, changed(getattr(leaf, field.name), change))  # frozen or not
            return twin
        return leaf

    return tree_map(visit, tree)


def holds_floats(tree: Any) -> bool:
    """Say whether there is a floating-point number anywhere in it."""
    found: list[Any] = []
    changed(tree, found.append)
    return bool(found)


def filled(leaf: Any, value: float, *, first_row: bool = False) -> Any:
    """Return a copy in which every number is `value`, or every one of the first row."""
    if not isinstance(leaf, torch.Tensor | np.ndarray):
        return type(leaf)(value)
    twin = leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf.copy()
    twin[slice(1) if first_row and leaf.ndim else ...] = value
    return twin


def scaled(leaf: Any, factor: float) -> Any:
    """Multiply every number, in its own type."""
    if isinstance(leaf, torch.Tensor):
        return leaf * factor
    return (leaf * factor).astype(leaf.dtype) if isinstance(leaf, np.ndarray) else type(leaf)(leaf * factor)


def _is_floating(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.is_floating_point()
    if isinstance(leaf, np.ndarray):
        return bool(np.issubdtype(leaf.dtype, np.floating))
    return isinstance(leaf, float | np.floating)
