"""Hydra's errors and OmegaConf's, each in one line that names the key, the value and what is allowed."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException, ValidationError

from resilient_train.app.config.sources import CONF, look_first
from resilient_train.errors import ConfigError, TrainError, in_one_line, text_of, unusable
from resilient_train.imports import similar

VERSION_BASE = "1.3"


def composed_raw(overrides: Sequence[str]) -> DictConfig:
    """Compose without a command line; Hydra's own node comes along."""
    GlobalHydra.instance().clear()
    look_first()
    try:
        with initialize_config_dir(str(CONF), version_base=VERSION_BASE):
            return compose("config", overrides=list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error, overrides) from error


def typed(overrides: Sequence[str]) -> list[str]:
    """Return Hydra's overrides as they were typed: to read them one by one resolves them, which may fail."""
    found = OmegaConf.to_container(overrides, resolve=False)
    assert isinstance(found, list)
    return found


def explained(error: Exception, overrides: Sequence[str] = ()) -> TrainError:
    """Turn an error of Hydra or OmegaConf into one line that names the key, the value and what is allowed.

    Any other error is no fault of the configuration, and is told as what it is.
    """
    if isinstance(error, TrainError):
        return error
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return TrainError(in_one_line(error))
    text = text_of(error)
    if isinstance(error, OverrideParseException):
        why = f"cannot be read ({text.splitlines()[0]}); quote what is special: 'key=\"a[b]\"'"
        return unusable(error.override, why)
    key = getattr(error, "full_key", None)
    if isinstance(error, ValidationError) and key:
        return _wrong_type(str(key), _value_of(str(key), overrides), text)
    if isinstance(error, ConfigKeyError) and key:
        return _unknown_key(str(key), _value_of(str(key), overrides), _fields_beside(str(key)))
    if isinstance(error, InterpolationResolutionError) and key:
        value, why = _value_of(str(key), overrides), f"cannot be resolved: {text.splitlines()[0]}"
        return ConfigError(str(key), value, why) if value is not None else unusable(str(key), why)
    if missing := re.search(
        r"Could not find '([^']+)'\s*(?:Available options in '[^']+':\s*(.*?))?(?:Config search path|$)", text, re.S
    ):
        group, _, option = missing[1].rpartition("/")
        options = (missing[2] or "").split()
        return unusable(
            f"{group or 'config'}={option}",
            f"no such option{similar(option, options) or ';' * bool(options)}{_allowed(options)}",
        )
    if override := re.search(r"Could not override '([^']+)'", text):
        name = override[1].split("@")[0]
        return _unknown_key(name, _value_of(name, overrides), _keys_beside(name, overrides))
    if missing_value := re.search(r"Missing mandatory value: (\S+)", text):
        return unusable(missing_value[1], "has to be given")
    return unusable("configuration", " ".join(text.split()))


def _wrong_type(key: str, value: str | None, text: str) -> ConfigError:
    wanted = re.search(r"could not be converted to (\w+)|for field of type '(\w+)'", text)
    spoken = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "a text"}
    spoken |= {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
    kind = (wanted[1] or wanted[2]) if wanted else ""
    why = f"is not {spoken.get(kind, kind)}" if wanted else " ".join(text.split("full_key")[0].split())
    return ConfigError(key, value, why) if value is not None else unusable(key, why)


def _unknown_key(key: str, value: str | None, known: Sequence[str]) -> ConfigError:
    parent, _, name = key.rpartition(".")
    why = f"no such key{similar(name, known) or ';' * bool(known)}"
    if known:
        why += f" {parent or 'the configuration'} has {', '.join(known)}"
    if parent and "_target_" in known:
        why += f" (+{key}=... hands its target one argument more)"
    return ConfigError(key, value, why) if value is not None else unusable(key, why)


def _value_of(key: str, overrides: Iterable[str]) -> str | None:
    for override in overrides:
        name, equals, value = override.lstrip("+~").partition("=")
        if equals and name.split("@")[0] == key:
            return value
    return None


def _keys_beside(key: str, overrides: Sequence[str]) -> list[str]:
    """Name the keys next to a misspelt one, with the options that were chosen on the same command line."""
    chosen = [one for one in overrides if "." not in one.partition("=")[0] and one.partition("=")[0].lstrip("+") != key]
    try:
        node: Any = composed_raw([one for one in chosen if (CONF / one.partition("=")[0]).is_dir()])
    except Exception:  # only a hint hangs on this
        return []
    for name in key.split(".")[:-1]:
        node = node.get(name) if isinstance(node, DictConfig) else None
    return [str(one) for one in node if one != "hydra"] if isinstance(node, DictConfig) else []


def _fields_beside(key: str) -> list[str]:
    from resilient_train.app.config.schema import Config  # here, for it brings torch along: whoever comes here has it

    kind: Any = Config
    for name in key.split(".")[:-1]:
        by_name = {field.name: _resolved(kind, field) for field in dataclasses.fields(kind)}
        kind = by_name.get(name)
        if not dataclasses.is_dataclass(kind):
            return []
    return [field.name for field in dataclasses.fields(kind)]


def _resolved(owner: Any, field: dataclasses.Field[Any]) -> Any:
    return typing.get_type_hints(owner)[field.name]


def _allowed(options: Sequence[str]) -> str:
    return f" There are {', '.join(options)}" if options else ""
