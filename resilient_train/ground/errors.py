"""Exceptions that end a run, each with a one-line message and an exit code.

TrainError               1  the message is printed; the traceback is in train.log
├── DirectoryInUse       1  another live process trains there: the same command works later
├── StorageFailed        1  the data cannot be read, after retries: the same command resumes later
├── RanksDiffer          1  the ranks decided differently: the same command resumes from the newest verified state
├── PeerEnded            1  another rank failed or ended: this one only lost its connection
├── GaveUp               3  the policy has nothing left to try: the newest verified state is on disk
└── ConfigError          2  the configuration is wrong: names the key, the value, and what is allowed

Stopped                 75  not an error, but a request; the state is on disk, and the same command resumes
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from resilient_train.ground.secrets import masked


class TrainError(Exception):
    """The run cannot continue. The message is one line."""

    exit_code = 1


class DirectoryInUse(TrainError):
    def __init__(self, directory: object, holder: str, advice: str) -> None:
        super().__init__(str(directory), holder, advice)  # to unpickle it on other ranks
        self.directory, self.holder, self.advice = str(directory), holder, advice

    def __str__(self) -> str:
        return f"{self.directory} is in use by {self.holder}: {self.advice}"


class StorageFailed(TrainError):
    """Rows could not be read because their storage fails: `StorageFailed(what, error)`."""

    def __str__(self) -> str:
        what, error = self.args
        why = "the storage of the data fails, and no row is to blame"
        return f"data: {what}: {why}; once it can be read again, the same command resumes ({error})"


class RanksDiffer(TrainError):
    """The ranks of a run decided differently, or have different weights. All ranks raise it at the same point."""


class PeerEnded(TrainError):
    """Another process of the run failed or ended; this one was healthy."""


class Stopped(BaseException):
    """A run ends on request. A BaseException, so that no `except Exception` catches it."""

    exit_code = 75


class GaveUp(TrainError):
    exit_code = 3

    def __init__(self, why: str, last_good: Path | None = None) -> None:
        """`last_good` is the path of the newest verified state, if this process wrote it."""
        super().__init__(why)
        self.last_good = last_good


class ConfigError(TrainError, ValueError):
    exit_code = 2

    def __init__(self, key: str, value: Any, why: str) -> None:
        self.key, self.value, self.why = key, value, why
        shown = "" if value is ... else f"={_short(value)}"
        super().__init__(f"{key}{shown}: {why}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.key, self.value, self.why)  # rank 0 sends it to the others


def named_type(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def unusable(key: str, why: str) -> ConfigError:
    """Build a ConfigError that does not show the value."""
    return ConfigError(key, ..., why)


_LIBRARIES = {"hydra", "omegaconf", "importlib", "torch", "accelerate"}
_STDLIB = os.path.dirname(os.__file__)


def text_of(error: BaseException) -> str:
    """Return the message of an exception: a user's class may have a `__str__` that raises."""
    try:
        return str(error)
    except Exception:
        return "<its __str__ raises>"


def in_one_line(error: BaseException) -> str:
    """Describe any error in one line, with the place in the user's code where it was raised, or else in a library."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    kind, text = type(error).__name__, text_of(error)
    if "Original Traceback" in text:  # of a data worker: torch passes its frames on as text
        frames = [(name, int(line)) for name, line in re.findall(r'File "(.+?)", line (\d+)', text)]
        kind, _, text = text.strip().splitlines()[-1].partition(": ")
    theirs = [f"{name}:{line}" for name, line in frames if not is_plumbing(name)]
    own = [place for place in theirs if "site-packages" not in place and not place.startswith(_STDLIB)]
    return f"{kind}: {_short(text, 300)}" + (f" ({(own or theirs)[-1]})" if theirs else "")


def short_message(error: BaseException) -> str:
    return str(error) if isinstance(error, TrainError | Stopped) else in_one_line(error)


def is_plumbing(filename: str) -> bool:
    """Say whether a file belongs to a library that runs user code, or to this package."""
    parts = {*filename.split("/")}
    is_ours = "resilient_train" in parts and "zoo" not in parts
    return is_ours or filename.startswith("<") or bool(_LIBRARIES & parts)


def _short(value: Any, limit: int = 200) -> str:
    text = "null" if value is None else str(value)
    text = " ".join(masked(text).split())  # first: half a secret would not be recognized
    return text if len(text) <= limit else text[: limit - 3] + "..."


def own_error(handled: BaseException | None) -> BaseException | None:
    """Return the error that is being raised; None if it is the one that the caller `handled` when its loop began."""
    error = sys.exc_info()[1]
    return None if error is handled else error


def running(error: BaseException) -> set[str]:
    """Return the names of the functions in which an error was raised."""
    return {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
