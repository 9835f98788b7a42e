"""The run directory: named, chosen, locked, and never overwritten."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilient_train.errors import ConfigError, DirectoryInUse
from resilient_train.files import commit_text, is_left_over, read_json, read_plain, remove, sync_directory
from resilient_train.ranks.lock import LOCK, DirectoryLock
from resilient_train.record.journal import JOURNAL, read
from resilient_train.secrets import masked

_OURS = "config.yaml"
_LAUNCH = ".launch"
CHECKPOINTS = "checkpoints"  # its name in a run directory
_OF_A_START = (
    *(_OURS, "train.log", JOURNAL, "incidents.jsonl", "progress", "summary.json", "mlflow.json", ".place", _LAUNCH),
    LOCK,  # it last
)


@dataclass
class RunDirectory:
    """A directory that one run alone writes to."""

    path: Path
    finished: dict[str, Any] | None = None  # the summary of a run that is complete already, or gave up
    goes_on: bool = False  # a run that began there is taken up
    changes: dict[str, str] = field(default_factory=dict)  # of its configuration since, by key
    is_new: bool = False  # there was nothing in it
    is_made: bool = False  # nor was it there

    @property
    def config(self) -> Path:
        return self.path / _OURS

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def was_launched_here(self) -> None:
        """Note who started it, so that a restart by the same launcher is known as one, and can be waited for."""
        if (launch := _launch()) is not None:
            commit_text(self.path / _LAUNCH, launch + "\n")

    def is_of_this_launch(self) -> bool:
        """Say whether the same launcher started the run that is there."""
        launch = _launch()
        if launch is None or not _is_restart():
            return False
        try:
            return read_plain(self.path / _LAUNCH).decode(errors="replace").strip() == launch
        except OSError:
            return False

    def take_away(self) -> None:
        """Leave nothing of a start that came to nothing; all of it where there is more, which nobody could explain."""
        with contextlib.suppress(OSError):
            if set(os.listdir(self.path)) - set(_OF_A_START):
                return
        for name in _OF_A_START:
            with contextlib.suppress(OSError):
                remove(self.path / name)
        if self.is_made:
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def log(self, rank: int) -> Path:
        return self.path / ("train.log" if rank == 0 else f"train.rank{rank}.log")


def claim(
    path: Path, *, steps: int, resume: str, is_unchanged: Callable[[Path], bool]
) -> tuple[RunDirectory, DirectoryLock]:
    """Lock `path` for a run of `steps` updates; with `resume` never the next directory beside it that is free.

    A directory that no update was made in is taken over. One that holds the complete run is handed back with its
    summary, and so is one that gave up if its config.yaml `is_unchanged`: it would give up again. One that holds
    anything else is gone on with.
    """
    path = path.absolute()
    for candidate in _names(path):
        try:
            directory, lock = _claim(candidate)
        except DirectoryInUse:
            if resume == "never":
                continue
            raise
        summary = read_json(directory.summary)
        done = summary.get("steps") if isinstance(summary, dict) else None
        if not directory.config.exists() or (_is_untouched(directory, summary) and resume != "never"):
            directory.is_new = not directory.config.exists()
            directory.was_launched_here()
            return directory, lock
        if resume != "never":
            is_complete = isinstance(done, int) and done >= steps and summary.get("status") == "completed"
            gave_up = isinstance(summary, dict) and summary.get("status") == "gave_up"
            is_finished = is_complete or (gave_up and is_unchanged(directory.config))
            if is_finished and (resume == "auto" or masked(resume) in _sources(directory.path)):
                directory.finished = summary
        if resume != "never" or directory.is_of_this_launch():
            directory.goes_on = directory.finished is None
            if directory.goes_on:
                directory.was_launched_here()
            return directory, lock
        lock.release()
    raise AssertionError("names never end")


def _is_untouched(directory: RunDirectory, summary: Any) -> bool:
    """Say whether no update was ever made there."""
    return isinstance(summary, dict) and summary.get("ticks") == 0 and not (directory.path / CHECKPOINTS).exists()


def _sources(run_dir: Path) -> set[str]:
    """The checkpoints that the run was led back to, by name."""
    try:
        return {str(entry.get("source")) for entry in read(run_dir / JOURNAL) if entry["kind"] == "taken_up_from"}
    except OSError:
        return set()


def _launch() -> str | None:
    """What is the same for all restarts of one launch; None where nothing restarts."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return f"agent {os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()}"
    return f"slurm {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else None


@dataclass(frozen=True)
class Launcher:
    """Somebody who may start a run again."""

    name: str
    is_seen: bool  # to be there still; of another host, or of a queue, nobody can tell from here


def launcher_of(run_dir: Path) -> Launcher | None:
    """Return who may start the newest process of a run again; None where nobody is left who would."""
    try:
        words = read_plain(run_dir / _LAUNCH).decode(errors="replace").split()
    except OSError:
        return None
    match words:
        case ["agent", *_, host, process] if process.isdigit() and host == socket.gethostname():
            return Launcher(f"its launcher, process {process},", True) if Path("/proc", process).exists() else None
        case ["agent", *_, host, _]:
            return Launcher(f"its launcher on {host}", False)
        case ["slurm", job]:
            return Launcher(f"SLURM's job {job}", False)
    return None


def _is_restart() -> bool:
    """Say whether a launcher has started this for another time."""
    return any(os.environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def _claim(path: Path) -> tuple[RunDirectory, DirectoryLock]:
    try:
        require_no_dangling_link("run.dir", path)
        is_made = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # so that a power cut does not lose the name of the directory itself
            sync_directory(path.parent)
        names = [] if (path / _OURS).exists() else sorted(one.name for one in path.iterdir())
        if strangers := [name for name in names if name != LOCK and not is_left_over(name)]:
            why = f"holds files that are not a run ({', '.join(strangers[:3])}): choose another directory"
            if JOURNAL in strangers:
                why = f"holds a run whose {_OURS} is missing: put it back, or choose another directory"
            raise ConfigError("run.dir", path, why)
        lock = DirectoryLock(path)
        for file in path.iterdir():
            if is_left_over(file.name):
                remove(file)
        return RunDirectory(path, is_made=is_made), lock
    except OSError as error:
        raise ConfigError("run.dir", path, f"cannot be written: {error.strerror or error}") from error


def require_no_dangling_link(key: str, path: Path) -> None:
    """Refuse a link that leads nowhere: to make a directory there says only that a file exists."""
    if path.is_symlink() and not path.exists():
        raise ConfigError(key, path, f"is a link to {path.readlink()}, which does not exist")


def _names(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}-{number}")
