"""The run directory: named, chosen, locked, and never overwritten."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient_train.errors import ConfigError, DirectoryInUse
from resilient_train.files import read_json
from resilient_train.ranks.lock import LOCK, DirectoryLock

_OURS = "config.yaml"


@dataclass
class RunDirectory:
    """A directory that one run alone writes to."""

    path: Path
    finished: dict[str, Any] | None = None  # the summary of a run that is complete already
    note: str | None = None  # why it is not the one that was asked for

    @property
    def config(self) -> Path:
        return self.path / _OURS

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def log(self, rank: int) -> Path:
        return self.path / ("train.log" if rank == 0 else f"train.rank{rank}.log")


def claim(path: Path, *, steps: int, resume: str) -> tuple[RunDirectory, DirectoryLock]:
    """Lock `path` for a run of `steps` updates, or the next free directory beside it.

    A directory that no update was made in is taken over. One that holds a complete run is handed back with its
    summary. One that holds more than that is never touched: the run starts in `NAME-2`, `NAME-3`, ...
    """
    path = path.absolute()
    if resume == "never":
        return _claim_next(path, because=None)
    directory, lock = _claim(path)
    summary = read_json(directory.summary)
    done = summary.get("steps") if isinstance(summary, dict) else None
    if done == 0 or not directory.config.exists():
        return directory, lock
    if isinstance(done, int) and done >= steps and summary.get("status") == "completed":
        directory.finished = summary
        return directory, lock
    lock.release()
    holds = f"ended at step {done}" if isinstance(done, int) else "was killed"
    return _claim_next(path, because=f"{path} holds a run that {holds} and cannot be continued yet")


def _claim_next(path: Path, because: str | None) -> tuple[RunDirectory, DirectoryLock]:
    for candidate in _names(path):
        try:
            directory, lock = _claim(candidate)
        except DirectoryInUse:
            continue
        if not directory.config.exists():
            directory.note = f"{because}: this run starts anew in {candidate}" if because else None
            return directory, lock
        lock.release()
    raise AssertionError("names never end")


def _claim(path: Path) -> tuple[RunDirectory, DirectoryLock]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        strangers = [] if (path / _OURS).exists() else sorted(one.name for one in path.iterdir() if one.name != LOCK)
        if strangers:
            why = f"holds files that are not a run ({', '.join(strangers[:3])}): choose another directory"
            raise ConfigError("run.dir", path, why)
        return RunDirectory(path), DirectoryLock(path)
    except OSError as error:
        raise ConfigError("run.dir", path, f"cannot be written: {error.strerror or error}") from error


def _names(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}-{number}")
