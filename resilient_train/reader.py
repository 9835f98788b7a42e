"""Reads what people write by hand: policies, checks and drills, from YAML or from a program.

The types of a dataclass's fields and the limits in their metadata say what is allowed. A mistake is a ConfigError: one
line with the key, its value and what is allowed there.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import yaml

from resilient_train.errors import ConfigError, in_one_line, unusable
from resilient_train.files import conf
from resilient_train.intervals import AUTO


class Unimportable(Exception):
    """A dotted path cannot be imported; the message says which part of it is missing."""


def find_in_working_directory() -> None:
    """Let `resilient-train` find a user's modules where `python -m resilient_train` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def find(path: str) -> Any:
    """Import the object at a dotted path. Raises Unimportable with the part that does not exist."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                continue
            raise Unimportable(f"{name} needs {error.name}, which is not installed") from error
        except Exception as error:
            raise Unimportable(in_one_line(error)) from error
        for attribute in parts[count:]:
            if not hasattr(found, attribute):
                what = f"{getattr(found, '__name__', found)} has no {attribute}"
                raise Unimportable(f"{what}{similar(attribute, dir(found))}")
            found = getattr(found, attribute)
        return found
    raise Unimportable(f"there is no module {parts[0]} on the path")


def similar(name: object, known: Iterable[str], then: str = "") -> str:
    """Suggest the closest known name, if one is close; `then` follows, as a sentence of its own after a suggestion."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    if close:
        return f"; did you mean {close[0]}?" + (f" {then[0].upper()}{then[1:]}" if then else "")
    return f"; {then}" if then else ""


@dataclass
class DataConfig:
    """Optional settings have defaults here too, so that a user's own file may leave them out."""

    train: dict[str, Any]
    batch_size: int = field(metadata={"at_least": 1})
    eval: dict[str, Any] | None = None
    shuffle: bool = True
    num_workers: int = field(default=0, metadata={"at_least": 0})
    quarantine: str | None = None  # the quarantine.json of another run
    collate: Any = None  # an import path, a node with a _target_, or null


@dataclass
class AccelerateConfig:
    cpu: bool
    mixed_precision: str | None = field(metadata={"one_of": ("no", "bf16", "fp16")})
    gradient_accumulation_steps: int = field(metadata={"at_least": 1})
    compile: bool
    ddp: dict[str, Any]
    fsdp: bool
    activation_checkpointing: bool
    blocks: list[str] | None


@dataclass
class ClipConfig:
    max_norm: float | None = field(metadata={"above": 0})
    max_value: float | None = field(metadata={"above": 0})


@dataclass
class MemoryConfig:
    every: int | str = field(metadata={"at_least": 0, "one_of": (AUTO,)})
    keep: int = field(metadata={"at_least": 2})
    max_gib: float | None = field(metadata={"at_least": 0})


@dataclass
class DiskConfig:
    every: int | str = field(default=0, metadata={"at_least": 0, "one_of": (AUTO,)})
    keep: int = field(default=3, metadata={"at_least": 1})
    keep_every: int = field(default=0, metadata={"at_least": 0})


T = TypeVar("T")

_REFUSED = object()
_NAMES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text", types.NoneType: "null"}


def limited(default: Any = dataclasses.MISSING, **limits: Any) -> Any:
    """Declare a field with limits: `at_least`, `above`, `at_most`, `one_of`; `null` is what null stands for."""
    return dataclasses.field(default=default, metadata=limits)


def read(kind: type[T], tree: Any, key: str) -> T:
    """Build a dataclass from the mapping at `key`.

    A field with `read` in its metadata is read by that function of key and value; nested dataclasses by this one.
    """
    known = {field.name: field for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    given = mapping(tree, key, known)
    hints, values = _hints(kind), {}  # type: ignore[arg-type]
    for name, value in given.items():
        where, hint, field = f"{key}.{name}", hints.get(name, Any), known[name]
        if "read" in field.metadata:
            values[name] = field.metadata["read"](where, value)
        elif dataclasses.is_dataclass(hint):
            values[name] = read(typing.cast(type, hint), value, where)
        else:
            values[name] = checked(where, value, hint, field.metadata)
    for field in known.values():
        if field.default is field.default_factory is dataclasses.MISSING and field.name not in given:
            raise unusable(f"{key}.{field.name}", "has to be given")
    try:
        return kind(**values)
    except ConfigError as error:  # from its `__post_init__`, which does not know the key
        raise type(error)(f"{key}.{error.key}", error.value, error.why) from error


def check(instance: Any, key: str = "") -> None:
    """Check the values of a dataclass, nested ones too; lists become what their types say."""
    hints = _hints(type(instance))  # type: ignore[arg-type]
    for one in dataclasses.fields(instance):
        where, value = f"{key}{one.name}", getattr(instance, one.name)
        if dataclasses.is_dataclass(value):
            check(value, f"{where}.")
        elif one.init:
            object.__setattr__(instance, one.name, checked(where, value, hints.get(one.name, Any), one.metadata))


def mapping(node: Any, key: str, known: Collection[str], what: str = "key") -> dict[str, Any]:
    """Return a mapping whose keys are all known."""
    if not isinstance(node, Mapping):
        raise ConfigError(key, node, f"must be a mapping with the keys {', '.join(known)}")
    for name, value in node.items():
        if name not in known:
            raise no_such(what, name, known, at=f"{key}.{name}", value=value)
    return dict(node)


def is_list(node: Any) -> bool:
    """Say whether a node is a list, and not a text."""
    return isinstance(node, Sequence) and not isinstance(node, str)


def no_such(what: str, name: Any, known: Iterable[str], *, at: str, value: Any = None, hint: str = "") -> ConfigError:
    """Build an error that suggests what may have been meant, and lists what there is."""
    names = list(known)
    there = f"there {'is' if len(names) < 2 else 'are'} {', '.join(names) or 'none'}"
    return ConfigError(at, value, f"no such {what}{similar(name, names, there)}{hint and f'; {hint}'}")


def checked(key: str, value: Any, kind: Any, limits: Mapping[str, Any]) -> Any:
    """Return a value as one of the type `kind` and within `limits`, or say what is allowed."""
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
        tree = _merged(option(group, base), tree) if base != "_self_" else tree
    return tree


def _merged(base: Any, changes: Any) -> Any:
    if not isinstance(base, Mapping) or not isinstance(changes, Mapping):
        return changes
    return {**base, **{name: _merged(base.get(name), value) for name, value in changes.items()}}


def _converted(value: Any, kind: Any, limits: Mapping[str, Any]) -> Any:
    """Convert a value to a type, or return _REFUSED. Types that YAML does not have accept anything."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        converted = (_converted(value, one, limits) for one in inner)
        return next((one for one in converted if one is not _REFUSED), _REFUSED)
    if origin is Literal:
        value = str(value) if isinstance(value, float) else value  # Hydra reads nan and inf as numbers
        return value if value in inner else _REFUSED
    if isinstance(origin, type) and issubclass(origin, Sequence):
        every = [_converted(one, inner[0], limits) for one in value] if is_list(value) else [_REFUSED]
        return _REFUSED if _REFUSED in every else every if origin is list else tuple(every)
    if kind is float and isinstance(value, str):
        value = _number(value)
    if kind in (int, float):
        fits = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
        return value if fits and _is_within(value, limits) else _REFUSED
    if kind is str and value not in limits.get("one_of", (value,)):
        return _REFUSED
    return value if kind not in _NAMES or isinstance(value, kind) else _REFUSED


def _number(text: str) -> Any:
    """Read a number that YAML reads as a text, such as 1e-4 without a dot."""
    try:
        return float(text)
    except ValueError:
        return text


def _is_within(value: float, limits: Mapping[str, Any]) -> bool:
    is_above = value > limits.get("above", -sys.float_info.max)
    is_finite = abs(value) <= sys.float_info.max
    return is_finite and is_above and limits.get("at_least", value) <= value <= limits.get("at_most", value)


def _allowed(kind: Any, limits: Mapping[str, Any]) -> str:
    """Describe the values that `_converted` accepts."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if "null" in limits:
        return f"{_allowed(kind, {name: one for name, one in limits.items() if name != 'null'})} or null"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_allowed(one, limits) for one in inner)
    if origin is Literal or (kind is str and "one_of" in limits):
        names = [str(one) for one in inner or limits["one_of"]]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a list, each {_allowed(inner[0], limits)}"
    bounds = [f"{name} {limits[key]}" for key, name in _LIMITS.items() if key in limits] if kind in (int, float) else []
    return _NAMES.get(kind, "a value") + (f" ({', '.join(bounds)})" if bounds else "")


_LIMITS = {"at_least": "at least", "above": "greater than", "at_most": "at most"}


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except Exception:  # an annotation that cannot be resolved is not a mistake of the configuration
        return {}
