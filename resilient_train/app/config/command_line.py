"""The command line as Hydra reads it: its options, its overrides, and its complaints in one line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from resilient_train import __version__
from resilient_train.app import VERBS
from resilient_train.app.config import CONF
from resilient_train.errors import ConfigError, TrainError, in_one_line, text_of, unusable
from resilient_train.reader import no_such, similar

VERSION_BASE = "1.3"


class _Parser(argparse.ArgumentParser):
    """Hydra's own parser, which raises ConfigError instead of printing its usage, and answers --version for us."""

    def __init__(self) -> None:
        super().__init__(parents=[get_args_parser()], add_help=False)
        for action in self._actions:
            if isinstance(action, argparse._VersionAction):
                action.version = f"resilient_train {__version__}, torch {version('torch')}"  # without importing torch

    def error(self, message: str) -> NoReturn:
        key, _, why = message.removeprefix("argument ").partition(": ")
        raise unusable(key, why)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. `words` of the result are as Hydra's main function accepts them: options come first."""
    parser = _Parser()
    given, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        word = unknown[0].partition("=")[0]
        hint = similar(word, [one for action in parser._actions for one in action.option_strings]) or "."
        raise unusable(word, f"no such option{hint} A setting has no dashes: key=value; --help shows every key")
    options = []
    for action in parser._actions:
        value = getattr(given, action.dest, None)
        if action.option_strings and value not in (None, False):
            name = action.option_strings[0]
            options.append(name if value is True else f"{name}={value}")
    given.words = [*options, *given.overrides]
    return given


def composed_raw(overrides: Sequence[str]) -> DictConfig:
    """Compose a configuration without a command line; it includes Hydra's own node."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base=VERSION_BASE):
            return compose("config", overrides=list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        raise explained(error, overrides) from error


def explained(error: Exception, overrides: Sequence[str] = ()) -> TrainError:
    """Turn an error of Hydra or OmegaConf into one line that names the key, the value and what is allowed."""
    if isinstance(error, TrainError):
        return error
    if isinstance(error, yaml.YAMLError | RecursionError | UnicodeDecodeError):  # of levels without end, or no text
        return unusable("configuration", f"a file cannot be read: {' '.join(text_of(error).split())}")
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return TrainError(in_one_line(error))
    text = text_of(error)
    if isinstance(error, OverrideParseException):
        if error.override.isidentifier():
            return unusable(error.override, f"neither a verb nor key=value{similar(error.override, VERBS)}")
        why = f"cannot be read ({text.splitlines()[0]}); quote special characters: 'key=\"a[b]\"'"
        return unusable(error.override, why)
    if isinstance(error, InterpolationResolutionError):
        key = str(error.full_key)
        return ConfigError(key, values_of(overrides).get(key, ...), f"cannot be resolved: {text.splitlines()[0]}")
    no_option = r"Could not find '([^']+)'\s*(?:Available options in '[^']+':\s*(.*?))?(?:Config search path|$)"
    if missing := re.search(no_option, text, re.DOTALL):
        group, _, option = missing[1].rpartition("/")
        return no_such("option", option, (missing[2] or "").split(), at=group or "config", value=option)
    if override := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(override[1].partition("@")[0], overrides)
    return unusable("configuration", " ".join(text.split()))


def values_of(overrides: Sequence[str]) -> dict[str, str]:
    """Return the values that overrides give, by key."""
    pairs = (one.lstrip("+~").partition("=") for one in overrides)
    return {name.partition("@")[0]: value for name, equals, value in pairs if equals}


def _unknown_key(key: str, overrides: Sequence[str]) -> ConfigError:
    """Suggest what a misspelt key may mean, among the keys of the options that the command line chooses."""
    chosen = [one for one in overrides if (CONF / one.partition("=")[0]).is_dir() and one.partition("=")[0] != key]
    node, parent, value = DictConfig({}), "", values_of(overrides).get(key, ...)
    with suppress(TrainError):  # without them only a hint is missing
        node = composed_raw(chosen)
    for name in key.split("."):
        known, below = [str(one) for one in node if one != "hydra"], node.get(name)
        if not parent:  # groups that have no node unless one of their options is chosen, such as experiment
            known += sorted(one.name for one in CONF.iterdir() if one.is_dir() and one.name not in known)
        if not isinstance(below, DictConfig):
            break
        node, parent = below, f"{parent}{name}."
    if name in known:
        return ConfigError(key, value, f"no such key; {parent}{name} has no keys of its own")
    hint = f"+{key}=... adds an argument of its _target_" if parent and "_target_" in known else ""
    return no_such("key", name, known, at=key, value=value, hint=hint)
