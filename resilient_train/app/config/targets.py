"""The objects that a configuration names: imported, checked against their signature, built."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hydra.utils import instantiate
from omegaconf import OmegaConf

from resilient_train import imports
from resilient_train.errors import ConfigError, in_one_line

Node = Mapping[str, Any]

_HYDRAS_OWN = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}


def find(key: str, path: Any) -> Any:
    """Import what a dotted path names, or say which part of it does not exist."""
    if not isinstance(path, str) or not path or path == "???":
        raise ConfigError(
            key, path, "give the import path of a class or function, such as my_package.my_module.MyClass"
        )
    try:
        return imports.find(path)
    except imports.Unimportable as error:
        raise ConfigError(key, path, f"cannot be imported: {error}") from error.__cause__


def check(key: str, node: Node, *, given: int = 0) -> Any:
    """Import a node's target and hold its keys to the signature; `given` positional arguments come from us."""
    target = find(f"{key}._target_", node.get("_target_"))
    if not callable(target):
        raise ConfigError(f"{key}._target_", node["_target_"], f"is a {type(target).__name__}, not a class or function")
    for name, value in node.items():
        if isinstance(value, Mapping) and "_target_" in value:
            check(f"{key}.{name}", value)
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # some built-ins do not tell theirs
        return target
    hints = _hints(target)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    by_name = {name: one for name, one in parameters.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    free = {name: one for name, one in list(by_name.items())[given:] if one.kind is not one.POSITIONAL_ONLY}
    for name, value in node.items():
        if name in _HYDRAS_OWN:
            continue
        if name not in free:
            if takes_any:
                continue
            allowed = f"it takes {', '.join(free) or 'no arguments'}"
            raise ConfigError(
                f"{key}.{name}",
                value,
                f"{node['_target_']} has no such argument{imports.similar(name, free)}; {allowed}",
            )
        wanted = hints.get(name, Any)
        if not isinstance(value, Mapping) and not _fits(value, wanted):
            raise ConfigError(
                f"{key}.{name}", value, f"has the wrong type: {node['_target_']} takes {_spoken(wanted)} here"
            )
    missing = [name for name, one in free.items() if one.default is one.empty and name not in node]
    if missing and not node.get("_partial_") and "_args_" not in node:
        hint = f"give it with +{key}.{missing[0]}=..."
        raise ConfigError(f"{key}._target_", node["_target_"], f"lacks the argument {' and '.join(missing)}: {hint}")
    return target


def build(key: str, node: Node, *given: Any) -> Any:
    """Call a node's target with `given` and its keys; lists and dicts arrive as plain ones."""
    check(key, node, given=len(given))
    try:
        built = instantiate(OmegaConf.create(dict(node)), *given, _convert_="all")
    except Exception as error:
        cause = error.__cause__ or error
        name = _blamed(node, cause)
        failed = "failed with" if name == "_target_" else f"{node['_target_']} failed with"
        raise ConfigError(f"{key}.{name}", node[name], f"{failed} {in_one_line(cause)}") from cause
    if node.get("_partial_") and isinstance(built, partial):
        # Hydra's own partial asks its policy at every call: 0.2 ms, and a step calls two, the objective and the curve.
        return partial(built.func, *built.args, **built.keywords)
    return built


def _blamed(node: Node, error: BaseException) -> str:
    """The one key whose value the error repeats, as torch does: `Invalid learning rate: -0.001`."""

    def is_said(value: Any) -> bool:
        if isinstance(value, list):
            return any(map(is_said, value))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and re.search(rf"(?<![\w.]){re.escape(str(value))}(?!\w|\.\d)", str(error)) is not None

    said = [name for name, value in node.items() if is_said(value)] if isinstance(error, ValueError) else []
    return said[0] if len(said) == 1 else "_target_"


def described(key: str, node: Node, thing: Any, wanted: str) -> ConfigError:
    """Build the error for a target that gave a thing of the wrong kind."""
    return ConfigError(f"{key}._target_", node["_target_"], f"gave a {type(thing).__name__}; {wanted} is wanted")


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # an annotation that cannot be resolved is no reason to refuse its owner
        return {}


def _fits(value: Any, wanted: Any) -> bool:
    """Say whether a plain value can be what is wanted; what is not plain is given the benefit of the doubt."""
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(wanted))
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if wanted in (bool, str):
        return isinstance(value, wanted)
    if wanted is type(None):
        return value is None
    return not (isinstance(value, str) and _is_tensor(wanted))


def _is_tensor(wanted: Any) -> bool:
    return getattr(wanted, "__module__", "").startswith("torch") and getattr(wanted, "__name__", "") == "Tensor"


def _spoken(wanted: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    options = typing.get_args(wanted) if typing.get_origin(wanted) in (typing.Union, types.UnionType) else (wanted,)
    return " or ".join(names.get(one, getattr(one, "__name__", str(one))) for one in options)
