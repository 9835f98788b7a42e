"""One remedy as a policy names it: a bare name, or a name with settings; checked, and built."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from resilient_train.errors import ConfigError, in_one_line, unusable
from resilient_train.recover.own import imported, unknown
from resilient_train.recover.remedies import KNOWN, ORDER, Remedy
from resilient_train.types import Action


@dataclass(frozen=True, slots=True)
class Prescribed:
    """A remedy, and how a decision tells of it."""

    action: Action
    remedy: Remedy

    @property
    def place(self) -> int:
        """Where in the order of a rung it is applied."""
        return ORDER.get(self.action.remedy, len(ORDER))


def prescribed(key: str, node: Any) -> Prescribed:
    """Build the remedy that stands at `key`, or say what is wrong with it."""
    if isinstance(node, Mapping) and len(node) == 1:
        ((name, settings),) = node.items()
    else:
        name, settings = node, {}
    if not isinstance(name, str):
        raise ConfigError(key, node, "give a remedy by its name, or as {name: {setting: value}}")
    settings = {} if settings is None else settings
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{key}.{name}", settings, "settings are given as {name: value}")
    settings = {str(setting): value for setting, value in settings.items()}
    kind = KNOWN.get(name) or _own(key, name)
    if dataclasses.is_dataclass(kind):
        settings = _checked(f"{key}.{name}", kind, settings)
    try:
        remedy = kind(**settings)
    except Exception as error:
        raise unusable(key, f"{name} failed with {in_one_line(error)}") from error
    return Prescribed(Action(name, _said(remedy, settings)), remedy)


def _own(key: str, name: str) -> Any:
    if "." not in name:
        hint = "one of your own is named by its import path, such as mine.Remedy"
        raise unusable(key, f"{unknown('remedy', name, KNOWN)}; {hint}")
    return imported(key, name)


def _said(remedy: Remedy, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in force, defaults included; those that say nothing (0, null) are left out."""
    if not dataclasses.is_dataclass(remedy):
        return dict(settings)
    every = {field.name: getattr(remedy, field.name) for field in dataclasses.fields(remedy) if field.init}
    defaults = {field.name: field.default for field in dataclasses.fields(remedy)}
    return {name: value for name, value in every.items() if value or value != defaults[name]}


def _checked(key: str, kind: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    try:
        hints = typing.get_type_hints(kind)
    except Exception:  # an annotation that cannot be resolved is no reason to refuse its owner
        hints = {}
    checked = {}
    for name, value in settings.items():
        if name not in fields:
            raise unusable(f"{key}.{name}", unknown("setting", name, fields))
        limits = {limit: fields[name].metadata.get(limit) for limit in ("at_least", "at_most", "above")}
        checked[name] = number(f"{key}.{name}", value, hints.get(name, Any), **limits)
    return checked


def number(
    key: str,
    value: Any,
    wanted: Any = int,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
) -> Any:
    """Return a value of the wanted type within its limits; what is not a number is given the benefit of the doubt."""
    options = typing.get_args(wanted) if typing.get_origin(wanted) in (typing.Union, types.UnionType) else (wanted,)
    if value is None and type(None) in options:
        return None
    if not {int, float} & set(options):
        return value
    if isinstance(value, str) and float in options:
        value = _read(value)
    fits = isinstance(value, int | float if float in options else int) and not isinstance(value, bool)
    limits = [f"at least {at_least}"] * (at_least is not None) + [f"greater than {above}"] * (above is not None)
    limits += [f"at most {at_most}"] * (at_most is not None)
    kind = ("a number" if float in options else "a whole number") + " or null" * (type(None) in options)
    if not fits:
        raise ConfigError(key, value, f"must be {', '.join([kind, *limits])}")
    inside = (at_least is None or value >= at_least) and (above is None or value > above)
    if not (inside and (at_most is None or value <= at_most) and math.isfinite(value)):
        raise ConfigError(key, value, f"must be {' and '.join(limits or ['finite'])}")
    return value


def _read(text: str) -> Any:
    """A YAML reader that goes by the letter takes 1e-4 for a text."""
    try:
        return float(text)
    except ValueError:
        return text
