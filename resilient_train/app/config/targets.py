"""The objects that a configuration names: imported, checked against their signature, built."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Mapping
from functools import partial
from typing import Any

from hydra.utils import instantiate
from omegaconf import OmegaConf

from resilient_train import imports
from resilient_train.errors import ConfigError, in_one_line

Node = Mapping[str, Any]

_HYDRAS_OWN = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}
_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


def find(key: str, path: Any) -> Any:
    """Import what a dotted path names, or say which part of it does not exist."""
    if not isinstance(path, str) or not path or path == "???":
        why = "give the import path of a class or function, such as my_package.my_module.MyClass"
        raise ConfigError(key, path, why)
    try:
        return imports.find(path)
    except imports.Unimportable as error:
        raise ConfigError(key, path, f"cannot be imported: {error}") from error.__cause__


def parameters(target: Any) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a callable; None for a built-in without a signature."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None


def check(key: str, node: Node, *, given: int = 0) -> Any:
    """Import a node's target and check the node's keys against its signature.

    `given` is the number of positional arguments that the caller passes itself.
    """
    path = node.get("_target_")
    target = find(f"{key}._target_", path)
    if not callable(target):
        raise ConfigError(f"{key}._target_", path, f"is a {type(target).__name__}, not a class or function")
    for name, value in node.items():
        if isinstance(value, Mapping) and "_target_" in value:
            check(f"{key}.{name}", value)
    known = parameters(target)
    if known is None:
        return target
    try:
        hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # an annotation that cannot be resolved is not an error of the configuration
        hints = {}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
    named = [one for one in known.values() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    free = {one.name: one for one in named[given:] if one.kind is not one.POSITIONAL_ONLY}
    for name, value in node.items():
        if name in _HYDRAS_OWN:
            continue
        if name in free:
            expected = hints.get(name, Any)
            if not isinstance(value, Mapping) and not _fits(value, expected):
                what = " or ".join(_TYPES.get(one, getattr(one, "__name__", str(one))) for one in _options(expected))
                raise ConfigError(f"{key}.{name}", value, f"has the wrong type: {path} takes {what} here")
        elif not takes_any:
            takes = imports.similar(name, free, f"it takes {', '.join(free) or 'no arguments'}")
            raise ConfigError(f"{key}.{name}", value, f"{path} has no such argument{takes}")
    missing = [name for name, one in free.items() if one.default is one.empty and name not in node]
    if missing and not node.get("_partial_") and "_args_" not in node:
        why = f"lacks the argument {' and '.join(missing)}: give it with +{key}.{missing[0]}=..."
        raise ConfigError(f"{key}._target_", path, why)
    return target


def build(key: str, node: Node, *given: Any) -> Any:
    """Call a node's target with `given` and its keys; lists and dicts are passed as plain ones."""
    check(key, node, given=len(given))
    try:
        built = instantiate(OmegaConf.create(dict(node)), *given, _convert_="all")
    except Exception as error:
        cause = error.__cause__ or error
        # torch repeats the value that it refuses: `Invalid learning rate: -0.001`.
        blamed = [name for name, value in node.items() if isinstance(cause, ValueError) and _occurs(value, str(cause))]
        name = blamed[0] if len(blamed) == 1 else "_target_"
        failed = "failed with" if name == "_target_" else f"{node['_target_']} failed with"
        raise ConfigError(f"{key}.{name}", node[name], f"{failed} {in_one_line(cause)}") from cause
    if node.get("_partial_") and isinstance(built, partial):
        # Hydra's own partial checks a policy at every call: 0.2 ms, twice a step, for the objective and the schedule.
        return partial(built.func, *built.args, **built.keywords)
    return built


def wrong_kind(key: str, node: Node, thing: Any, expected: str) -> ConfigError:
    """Build the error for a target that returned an object of the wrong kind."""
    return ConfigError(f"{key}._target_", node["_target_"], f"returned a {type(thing).__name__}; expected {expected}")


def _occurs(value: Any, text: str) -> bool:
    """Say whether a number, or one in a list, occurs in a text."""
    if isinstance(value, list):
        return any(_occurs(one, text) for one in value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and re.search(rf"(?<![\w.]){re.escape(str(value))}(?!\w|\.\d)", text) is not None


def _options(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _fits(value: Any, expected: Any) -> bool:
    """Say whether a plain value can have the expected type; of a type that is not plain, only a tensor rejects text."""
    for kind in _options(expected):
        if kind in (int, float):
            is_fit = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
        elif kind in (bool, str, type(None)):
            is_fit = isinstance(value, kind)
        else:
            is_tensor = getattr(kind, "__module__", "").startswith("torch") and kind.__name__ == "Tensor"
            is_fit = not (is_tensor and isinstance(value, str))
        if is_fit:
            return True
    return False
