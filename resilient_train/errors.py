"""What can end a run, as exceptions that carry one clear line and an exit code.

TrainError               1  told in one line; the traceback is in train.log
├── DirectoryInUse       1  another live process trains there: later the same command works
└── ConfigError          2  the configuration is wrong: names the key, the value, and what is allowed
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class TrainError(Exception):
    """The run cannot go on. The message is one line for a person."""

    exit_code = 1


class DirectoryInUse(TrainError):
    """Another live process holds the run directory."""


class ConfigError(TrainError, ValueError):
    """A configuration key has a value that cannot be used."""

    exit_code = 2

    def __init__(self, key: str, value: Any, why: str) -> None:
        self.key, self.value, self.why = key, value, why
        shown = "" if value is _NO_VALUE else f"={_short(value)}"
        super().__init__(f"{key}{shown}: {why}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.key, self.value, self.why)  # rank 0 sends it to the others


class _NoValue(Enum):
    """A single value that pickling leaves single."""

    NO_VALUE = 0


_NO_VALUE = _NoValue.NO_VALUE


def unusable(key: str, why: str) -> ConfigError:
    """Build a ConfigError about a key whose value is no use in the message."""
    return ConfigError(key, _NO_VALUE, why)


def _short(value: Any, limit: int = 200) -> str:
    text = "null" if value is None else str(value)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
