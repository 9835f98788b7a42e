"""The options of the command line, which are Hydra's: parsed by its own parser, but with mistakes in one line."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from resilient_train import __version__
from resilient_train.app.config.manual import meanings
from resilient_train.errors import ConfigError, unusable
from resilient_train.reader import similar
from resilient_train.secrets import masked_override


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        key, _, why = message.removeprefix("argument ").partition(": ")
        raise unusable(key, why)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line, with options anywhere among the overrides. Raises ConfigError.

    `words` of the result is the command line as Hydra's main function accepts it: options first.
    """
    parser = _parser()
    given, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        raise _unknown_option(unknown[0], [*words, ""][words.index(unknown[0]) + 1], parser)
    options = []
    for action in parser._actions:
        value = getattr(given, action.dest, None)
        if action.option_strings and value not in (None, False):
            name = action.option_strings[0]
            options.append(name if value is True else f"{name}={value}")
    given.words = [*options, *given.overrides]
    return given


def option_names() -> list[str]:
    """List the options in their long form."""
    return [name for action in _parser()._actions for name in action.option_strings if name.startswith("--")]


def _parser() -> argparse.ArgumentParser:
    """Return Hydra's own parser, which answers --version for us."""
    parser = _Parser(parents=[get_args_parser()], add_help=False)
    for action in parser._actions:
        if isinstance(action, argparse._VersionAction):
            action.version = f"resilient_train {__version__}, torch {version('torch')}"  # without importing torch
    return parser


def _unknown_option(word: str, next_word: str, parser: argparse.ArgumentParser) -> ConfigError:
    """Suggest the key that is likely meant, with the value that was given: `--steps 10` for `run.steps=10`."""
    typed, equals, value = word.partition("=")
    if not equals and not next_word.startswith("-") and "=" not in next_word:
        value = next_word
    name = typed.lstrip("-").replace("-", "_")
    keys = [known.partition("=")[0] for known in meanings() if not known.endswith(".")]
    key = name if name in keys else next((one for one in keys if one.rpartition(".")[2] == name), None)
    options = [option for action in parser._actions for option in action.option_strings]
    meant = masked_override(f"{key}={value or '...'}")
    hint = f"; did you mean {meant}?" if key else similar(typed, options) or "."
    return unusable(typed, f"no such option{hint} A setting has no dashes: key=value; --help explains every key")


def name_of(overrides: Sequence[str]) -> str:
    """Name a job by what the sweep varies, such as `seed=1, lr=0.001`.

    Hydra passes all overrides to each job; those that the command line gives one value are the same for all jobs. In a
    process of another launcher the command line is unknown, and all of them are named.
    """
    plain = [re.sub(r"\\(.)", r"\1", word) for word in overrides]  # Hydra has escaped them
    same = _given_one_value(sys.argv[1:])
    swept = [word for word in plain if word.partition("=")[0] not in same] or plain
    pairs = [masked_override(word).partition("=") for word in swept]
    short = [key.rpartition(".")[2] for key, _, _ in pairs]
    keys = [last if short.count(last) == 1 else key for last, (key, _, _) in zip(short, pairs, strict=True)]
    return ", ".join(f"{key}={value}" for key, (_, _, value) in zip(keys, pairs, strict=True))


def _given_one_value(words: Sequence[str]) -> set[str]:
    """Return the keys that a command line gives one value; Hydra passes on `false` as `False`."""
    parser, found = OverridesParser.create(), set()
    for word in words:
        with suppress(HydraException):  # an option
            if not (override := parser.parse_override(word)).is_sweep_override():
                found.add(override.get_key_element())
    return found
