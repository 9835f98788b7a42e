"""Reads what people write by hand: policies, checks and drills, from YAML or from a program.

Types and limits of dataclass fields say what is allowed. A ConfigError has key, value and what is allowed in one line.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import yaml

from resilient_train.ground.errors import ConfigError, in_one_line, unusable
from resilient_train.ground.files import conf


def find_in_working_directory() -> None:
    """Let `resilient-train` find a user's modules where `python -m resilient_train` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def find(key: str, path: Any) -> Any:
    """Import the object at the dotted path which is the value of `key`, or say why it cannot be imported."""
    if not isinstance(path, str) or not path or path == "???":
        why = "give the import path of a class or function, such as my_package.my_module.MyClass"
        raise ConfigError(key, path, why)
    first, *rest = path.split(".")
    try:
        found, name = importlib.import_module(first), first
        for part in rest:
            name = f"{name}.{part}"
            if not hasattr(found, part) and hasattr(found, "__path__"):
                importlib.import_module(name)
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(key, path, f"cannot be imported: {in_one_line(error)}") from error
    return found


def limited(default: Any = dataclasses.MISSING, **limits: Any) -> Any:
    """Declare a field with limits: `at_least`, `above`, `at_most`; `null` is what null stands for."""
    return dataclasses.field(default=default, metadata=limits)


@dataclass
class DataConfig:
    """Optional settings have defaults here too, so that a user's own file may leave them out."""

    train: dict[str, Any]
    batch_size: int = limited(at_least=1)
    eval: dict[str, Any] | None = None
    shuffle: bool = True
    num_workers: int = limited(0, at_least=0)
    collate: Any = None  # an import path, a node with a _target_, or null


@dataclass
class AccelerateConfig:
    cpu: bool
    compile: bool
    ddp: dict[str, Any]
    fsdp: bool
    activation_checkpointing: bool
    blocks: list[str] | None
    mixed_precision: Literal["no", "bf16", "fp16"] | None
    gradient_accumulation_steps: int = limited(at_least=1)


@dataclass
class ClipConfig:
    max_norm: float | None = limited(above=0)
    max_value: float | None = limited(above=0)


@dataclass
class MemoryConfig:
    every: int = limited(at_least=0)
    keep: int = limited(at_least=2)
    max_gib: float | None = limited(at_least=0)


@dataclass
class DiskConfig:
    every: int = limited(0, at_least=0)
    keep: int = limited(3, at_least=1)
    keep_every: int = limited(0, at_least=0)


T = TypeVar("T")

_REFUSED = object()
_BOOLEANS = {"true": True, "false": False}  # as an environment variable is a text
_NAMES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text", types.NoneType: "null"}
_LIMITS = {"at_least": "at least", "above": "greater than", "at_most": "at most"}


def read(kind: type[T], tree: Any, key: str) -> T:
    """Build a dataclass from the mapping at `key`; a `read` in the metadata of a field is called with key and value."""
    known = {field.name: field for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    given, prefix = mapping(tree, key, known), f"{key}." if key else ""
    values, types_of = {}, hints(kind)  # type: ignore[arg-type]
    for name, value in given.items():
        where, hint, field = f"{prefix}{name}", types_of.get(name, Any), known[name]
        if "read" in field.metadata:
            values[name] = field.metadata["read"](where, value)
        elif dataclasses.is_dataclass(hint):
            values[name] = read(typing.cast(type, hint), value, where)
        else:
            values[name] = checked(where, value, hint, field.metadata)
    for field in known.values():
        if field.default is field.default_factory is dataclasses.MISSING and field.name not in given:
            raise unusable(f"{prefix}{field.name}", "has to be given")
    try:
        return kind(**values)
    except ConfigError as error:  # from its `__post_init__`, which does not know the key
        raise type(error)(f"{prefix}{error.key}", error.value, error.why) from error


def mapping(node: Any, key: str, known: Collection[str], what: str = "key") -> dict[str, Any]:
    if not isinstance(node, Mapping):
        raise ConfigError(key, node, f"must be a mapping with the keys {', '.join(known)}")
    for name, value in node.items():
        if name not in known:
            raise no_such(what, name, known, at=f"{key}.{name}" if key else name, value=value)
    return dict(node)


def is_list(node: Any) -> bool:
    return isinstance(node, Sequence) and not isinstance(node, str)


def no_such(what: str, name: Any, known: Iterable[str], *, at: str, value: Any = None, hint: str = "") -> ConfigError:
    names = list(known)
    there = f"there {'is' if len(names) < 2 else 'are'} {', '.join(names) or 'none'}"
    return ConfigError(at, value, f"no such {what}; {there}{hint and f'; {hint}'}")


def checked(key: str, value: Any, kind: Any, limits: Mapping[str, Any]) -> Any:
    if value is None and "null" in limits:
        return limits["null"]
    converted = _converted(value, kind, limits)
    if converted is _REFUSED:
        raise ConfigError(key, value, f"must be {_allowed(kind, limits)}")
    return converted


def option(group: str, name: str, hint: str = "") -> Any:
    """Read the file of an option in `conf/`, on top of the one that its `defaults` name, as Hydra does."""
    names = sorted(file.stem for file in (conf() / group).glob("*.yaml"))
    if name not in names:
        raise no_such("option", name, names, at=group, value=name, hint=hint)
    tree = yaml.safe_load((conf() / group / f"{name}.yaml").read_text(encoding="utf-8"))
    for base in tree.pop("defaults", ()):
        tree = merged(option(group, base), tree) if base != "_self_" else tree
    return tree


def merged(base: Any, changes: Any) -> Any:
    if not isinstance(base, Mapping) or not isinstance(changes, Mapping):
        return changes
    return {**base, **{name: merged(base.get(name), value) for name, value in changes.items()}}


def _converted(value: Any, kind: Any, limits: Mapping[str, Any]) -> Any:
    """Convert a value to a type, or return _REFUSED. Types that YAML does not have accept anything."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        converted = (_converted(value, one, limits) for one in inner)
        return next((one for one in converted if one is not _REFUSED), _REFUSED)
    if origin is Literal:
        value = str(value) if isinstance(value, float) else value  # Hydra reads nan and inf as numbers
        return value if value in inner else _REFUSED
    if origin is dict:
        return value if isinstance(value, Mapping) else _REFUSED
    if isinstance(origin, type) and issubclass(origin, Sequence):
        if not is_list(value):
            return _REFUSED
        every = [_converted(one, _of_each(inner), limits) for one in value]
        return _REFUSED if _REFUSED in every else every if origin is list else tuple(every)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind in (int, float):
        # YAML reads 1e-4 as a text, and an environment variable is one.
        if isinstance(value, str) and "as_is" not in limits:
            with suppress(ValueError):
                return _converted(kind(value), kind, limits)
        return value if is_number and isinstance(value, kind | int) and _is_within(value, limits) else _REFUSED
    if kind is str:
        value = str(value) if is_number and "as_is" not in limits else value  # a name such as 2024
        return value if isinstance(value, str) else _REFUSED
    if kind is bool and "as_is" not in limits:
        return _BOOLEANS.get(str(value).lower(), _REFUSED)
    if _is_tensor(kind):
        return _REFUSED
    return value if kind not in _NAMES or isinstance(value, kind) else _REFUSED


def _is_tensor(kind: Any) -> bool:
    """Whether it is torch's, which is not imported here: no configuration gives one."""
    return getattr(kind, "__name__", "") == "Tensor"


def _of_each(inner: tuple[Any, ...]) -> Any:
    """The type of what a list or tuple holds; any, if its places have different ones."""
    kinds = {*inner} - {...}
    return kinds.pop() if len(kinds) == 1 else Any


def _is_within(value: float, limits: Mapping[str, Any]) -> bool:
    is_above = value > limits.get("above", -sys.float_info.max)
    is_finite = abs(value) <= sys.float_info.max
    return is_finite and is_above and limits.get("at_least", value) <= value <= limits.get("at_most", value)


def _allowed(kind: Any, limits: Mapping[str, Any]) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if "null" in limits:
        return f"{_allowed(kind, {name: one for name, one in limits.items() if name != 'null'})} or null"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_allowed(one, limits) for one in inner if not _is_tensor(one))
    if origin is Literal:
        return str(inner[0]) if len(inner) == 1 else f"one of {', '.join(map(str, inner))}"
    if origin is dict:
        return "a mapping"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        each = _of_each(inner)
        return "a list" if each is Any else f"a list, each {_allowed(each, limits)}"
    bounds = [f"{name} {limits[key]}" for key, name in _LIMITS.items() if key in limits] if kind in (int, float) else []
    return _NAMES.get(kind, getattr(kind, "__name__", "a value")) + (f" ({', '.join(bounds)})" if bounds else "")


@functools.cache
def hints(kind: Any) -> dict[str, Any]:
    """Return the types of a class's or function's names; none if one of them cannot be resolved."""
    try:
        return typing.get_type_hints(kind)
    except Exception:  # which is not a mistake of the configuration
        return {}
