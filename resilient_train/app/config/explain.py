"""Hydra's composition, with errors of Hydra and OmegaConf in one line: the key, the value and what is allowed."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException, ValidationError

from resilient_train.app import VERBS
from resilient_train.app.config import CONF
from resilient_train.errors import ConfigError, TrainError, in_one_line, text_of, unusable
from resilient_train.files import read_yaml_text
from resilient_train.imports import similar

VERSION_BASE = "1.3"
_TYPES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "a text"}
_TYPES |= {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}


_PARSED: dict[Path, ConfigResult] = {}  # files of the package, which do not change


class FileConfigSource(file_config_source.FileConfigSource):
    """Checks a file of the user's before Hydra loads it: a few lines of YAML may expand to more than fits in memory.

    It has the name of Hydra's own class, under which Hydra registers it.
    """

    def load_config(self, config_path: str) -> ConfigResult:
        """Load a file, or raise ConfigError with one line that says why it is no configuration."""
        file = Path(self.path) / self._normalize_file_name(config_path)
        if file.is_relative_to(CONF):  # Hydra composes twice, once to learn its mode: half of the time is parsing
            if file not in _PARSED:
                _PARSED[file] = super().load_config(config_path)
            return copy.deepcopy(_PARSED[file])
        if not file.exists():
            return super().load_config(config_path)
        try:
            read_yaml_text(file)
            return super().load_config(config_path)
        except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
            raise unusable(str(file), f"is no configuration: {' '.join(str(error).split())[:300]}") from error


def check_files_first() -> None:
    """Let Hydra check files before it loads them, in this process."""
    SourcesRegistry.instance().types[FileConfigSource.scheme()] = FileConfigSource


def composed_raw(overrides: Sequence[str]) -> DictConfig:
    """Compose a configuration without a command line; it includes Hydra's own node."""
    GlobalHydra.instance().clear()
    check_files_first()
    try:
        with initialize_config_dir(str(CONF), version_base=VERSION_BASE):
            return compose("config", overrides=list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error, overrides) from error


def typed(overrides: Sequence[str]) -> list[str]:
    """Return Hydra's overrides as they were typed: reading one by one would resolve them, which may fail."""
    found = OmegaConf.to_container(overrides, resolve=False)
    assert isinstance(found, list)
    return found


def explained(error: Exception, overrides: Sequence[str] = ()) -> TrainError:
    """Turn an error of Hydra or OmegaConf into one line that names the key, the value and what is allowed.

    Any other error is not about the configuration, and becomes a TrainError with its own message.
    """
    if isinstance(error, TrainError):
        return error
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return TrainError(in_one_line(error))
    text = text_of(error)
    if isinstance(error, OverrideParseException):
        if error.override.isidentifier():
            why = f"neither a verb nor key=value{similar(error.override, VERBS)}"
            return unusable(error.override, why)
        why = f"cannot be read ({text.splitlines()[0]}); quote special characters: 'key=\"a[b]\"'"
        return unusable(error.override, why)
    if key := str(getattr(error, "full_key", None) or ""):
        if isinstance(error, ValidationError):
            return _at(key, overrides, _wrong_type(text))
        if isinstance(error, ConfigKeyError):
            return _unknown_key(key, overrides)
        if isinstance(error, InterpolationResolutionError):
            return _at(key, overrides, f"cannot be resolved: {text.splitlines()[0]}")
    no_option = r"Could not find '([^']+)'\s*(?:Available options in '[^']+':\s*(.*?))?(?:Config search path|$)"
    if missing := re.search(no_option, text, re.DOTALL):
        group, _, option = missing[1].rpartition("/")
        options = (missing[2] or "").split()
        hint = similar(option, options, f"there are {', '.join(options)}" if options else "")
        return unusable(f"{group or 'config'}={option}", f"no such option{hint}")
    if override := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(override[1].split("@")[0], overrides)
    if missing_value := re.search(r"Missing mandatory value: (\S+)", text):
        return unusable(missing_value[1], "has to be given")
    return unusable("configuration", " ".join(text.split()))


def _wrong_type(text: str) -> str:
    expected = re.search(r"could not be converted to (\w+)|for field of type '(\w+)'", text)
    if expected is None:
        return " ".join(text.split("full_key")[0].split())
    kind = expected[1] or expected[2]
    return f"is not {_TYPES.get(kind, kind)}"


def _unknown_key(key: str, overrides: Sequence[str]) -> ConfigError:
    parent, name, known = _unknown_part(key, overrides)
    if name in known:
        return _at(key, overrides, f"no such key; {f'{parent}.' * bool(parent)}{name} has no keys of its own")
    hint = similar(name, known, f"there are {', '.join(known)}{f' in {parent}' * bool(parent)}" if known else "")
    if parent and "_target_" in known:
        hint += f" (+{key}=... adds an argument of its _target_)"
    return _at(key, overrides, f"no such key{hint}")


def _at(key: str, overrides: Iterable[str], why: str) -> ConfigError:
    """Build the error for a key, with its value if an override has it."""
    for override in overrides:
        name, equals, value = override.lstrip("+~").partition("=")
        if equals and name.split("@")[0] == key:
            return ConfigError(key, value, why)
    return unusable(key, why)


def _unknown_part(key: str, overrides: Sequence[str]) -> tuple[str, str, list[str]]:
    """Split a misspelt key: the node that exists, the first name that does not, and the keys that the node has.

    With the options that were chosen on the same command line.
    """
    chosen = [one for one in overrides if (CONF / one.partition("=")[0]).is_dir() and one.partition("=")[0] != key]
    try:
        node: Any = composed_raw(chosen)
    except Exception:  # without it only a hint is missing
        node = None
    names = key.split(".")
    place = 0
    while place < len(names) - 1 and isinstance(node, DictConfig) and isinstance(node.get(names[place]), DictConfig):
        node, place = node.get(names[place]), place + 1
    known = [str(one) for one in node if one != "hydra"] if isinstance(node, DictConfig) else []
    return ".".join(names[:place]), names[place], known
