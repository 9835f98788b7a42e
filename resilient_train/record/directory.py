"""The run directory: named, chosen, locked, and never overwritten."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient_train.errors import ConfigError, DirectoryInUse
from resilient_train.files import is_left_over, read_json
from resilient_train.ranks.lock import LOCK, DirectoryLock

_OURS = "config.yaml"


@dataclass
class RunDirectory:
    """A directory that one run alone writes to."""

    path: Path
    finished: dict[str, Any] | None = None  # the summary of a run that is complete already, or gave up
    note: str | None = None  # why it is not the one that was asked for

    @property
    def config(self) -> Path:
        return self.path / _OURS

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def log(self, rank: int) -> Path:
        return self.path / ("train.log" if rank == 0 else f"train.rank{rank}.log")


def claim(
    path: Path, *, steps: int, resume: str, is_same: Callable[[Path], bool], is_unchanged: Callable[[Path], bool]
) -> tuple[RunDirectory, DirectoryLock]:
    """Lock `path` for a run of `steps` updates, or the next directory beside it that is free.

    A directory that no update was made in is taken over. One that holds the complete run, beside the first only if its
    config.yaml `is_same`, is handed back with its summary, and so is one that gave up if its config.yaml
    `is_unchanged`: it would give up again. One that holds anything else is never touched.
    """
    path = path.absolute()
    note = None
    for candidate in _names(path):
        try:
            directory, lock = _claim(candidate)
        except DirectoryInUse:
            if resume == "never":
                continue
            raise
        summary = read_json(directory.summary)
        done = summary.get("steps") if isinstance(summary, dict) else None
        is_untouched = isinstance(summary, dict) and summary.get("ticks") == 0
        if not directory.config.exists() or (is_untouched and resume != "never"):
            directory.note = f"{note}: this run starts anew in {candidate}" if note else None
            return directory, lock
        if resume != "never":
            is_complete = isinstance(done, int) and done >= steps and summary.get("status") == "completed"
            gave_up = isinstance(summary, dict) and summary.get("status") == "gave_up"
            if (is_complete and (candidate == path or is_same(directory.config))) or (
                gave_up and is_unchanged(directory.config)
            ):
                directory.finished = summary
                return directory, lock
            holds = f"ended at step {done}" if isinstance(done, int) else "was killed"
            note = note or f"{path} holds a run that {holds} and cannot be continued yet"
        lock.release()
    raise AssertionError("names never end")


def _claim(path: Path) -> tuple[RunDirectory, DirectoryLock]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = [] if (path / _OURS).exists() else sorted(one.name for one in path.iterdir())
        if strangers := [name for name in names if name != LOCK and not is_left_over(name)]:
            why = f"holds files that are not a run ({', '.join(strangers[:3])}): choose another directory"
            raise ConfigError("run.dir", path, why)
        lock = DirectoryLock(path)
        for file in path.iterdir():
            if is_left_over(file.name):
                file.unlink()
        return RunDirectory(path), lock
    except OSError as error:
        raise ConfigError("run.dir", path, f"cannot be written: {error.strerror or error}") from error


def _names(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}-{number}")
