"""What the user gives to `guard.keep`: whatever its `state_dict` is made of, it is restored in the classes it has."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from resilient_train.state.tree import Tree, taken_apart, to_original_device


class Stateful(Protocol):
    """Anything with a state that can be saved and restored: a schedule, a cursor, an object of the user's."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


def restore_item(item: Stateful, saved: Tree) -> None:
    """Restore a state that was copied or read: the item gets a copy of its own, in the classes of its present state."""
    item.load_state_dict(_in_classes_of(item.state_dict(), to_original_device(saved)))


def restore_changed(item: Stateful, saved: Tree) -> None:
    """Restore an item unless it still is what was copied. Waits for the device."""
    (now, tensors), (before, copies) = taken_apart(item.state_dict()), taken_apart(saved)
    try:
        is_same = bool(now == before) and all(map(torch.equal, tensors, copies))
    except (RuntimeError, ValueError):  # other types or devices; arrays
        is_same = False
    if not is_same:
        restore_item(item, saved)


def _in_classes_of(like: Any, tree: Tree) -> Any:
    """Return a tree, whose containers are plain ones, in those that `like` has there: an OrderedDict, a Counter."""
    if isinstance(tree, dict) and isinstance(like, dict):
        made = copy.copy(like)  # with what the class adds, such as the versions of modules, or a default
        made.clear()
        for key, value in tree.items():
            made[key] = _in_classes_of(like.get(key), value)
        return made
    if type(tree) in (list, tuple) and isinstance(like, list | tuple):
        return type(tree)(_in_classes_of(*pair) for pair in zip([*like, *[None] * len(tree)], tree, strict=False))
    return tree


class Metrics:
    """Metrics of torchmetrics, or a module that has some: their `state_dict` leaves out what they have counted."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._metrics = {path: one for path, one in module.named_modules() if hasattr(one, "_update_count")}

    def state_dict(self) -> dict[str, Any]:
        counted = {
            path: {name: getattr(one, name) for name in (*one._defaults, "_update_count", "_computed")}
            for path, one in self._metrics.items()
        }
        return {"module": self._module.state_dict(), "counted": counted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._module.load_state_dict(state["module"])
        for path, values in state["counted"].items():
            vars(self._metrics[path]).update(values)
