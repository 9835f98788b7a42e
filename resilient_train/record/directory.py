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
from resilient_train.record.endings import CHECKPOINTS, CONFIG, SUMMARY
from resilient_train.record.journal import JOURNAL, read
from resilient_train.secrets import masked

_LAUNCH = ".launch"
_OF_A_START = (  # the lock last
    *(CONFIG, "train.log", JOURNAL, "incidents.jsonl", "progress", SUMMARY, "mlflow.json", ".place"),
    *(_LAUNCH, LOCK),
)


@dataclass
class RunDirectory:
    """A directory that one run alone writes to."""

    path: Path
    finished: dict[str, Any] | None = None  # the summary of a run that is complete already, or gave up
    resumes: bool = False  # a run that began there
    changes: dict[str, str] = field(default_factory=dict)  # of its configuration since then, by key
    is_new: bool = False  # it was empty
    is_made: bool = False  # it did not exist

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    def was_launched_here(self) -> None:
        """Note the launcher, so that its restarts are recognized, and can be waited for."""
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

    def remove_start(self) -> None:
        """Remove the files of a start that was refused; none of them if there are any others."""
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
    """Lock `path` for a run of `steps` updates; with `resume` never the next sibling that is free.

    A directory without any update is reused. One that holds the complete run is returned with its summary, and so is
    one that gave up if its config.yaml `is_unchanged`: it would give up again. Any other run resumes.
    """
    path = path.absolute()
    for candidate in _names(path):
        try:
            directory, lock = _claim(candidate)
        except DirectoryInUse:
            if resume == "never":
                continue
            raise
        node = read_json(directory.path / SUMMARY)
        summary = node if isinstance(node, dict) else {}
        has_no_update = summary.get("ticks") == 0 and not (directory.path / CHECKPOINTS).exists()
        if not directory.config.exists() or (has_no_update and resume != "never"):
            directory.is_new = not directory.config.exists()
            directory.was_launched_here()
            return directory, lock
        if resume != "never":
            done, status = summary.get("steps"), summary.get("status")
            is_complete = isinstance(done, int) and done >= steps and status == "completed"
            is_finished = is_complete or (status == "gave_up" and is_unchanged(directory.config))
            if is_finished and (resume == "auto" or masked(resume) in _sources(directory.path)):
                directory.finished = summary
        if resume != "never" or directory.is_of_this_launch():
            directory.resumes = directory.finished is None
            if directory.resumes:
                directory.was_launched_here()
            return directory, lock
        lock.release()
    raise AssertionError("names never end")


def _sources(run_dir: Path) -> set[str]:
    """Return the checkpoints that the run was resumed from by name."""
    try:
        return {str(entry.get("source")) for entry in read(run_dir / JOURNAL) if entry["kind"] == "taken_up_from"}
    except OSError:
        return set()


def _launch() -> str | None:
    """Name what all restarts of one launch share; None where nothing restarts."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return f"agent {os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()}"
    return f"slurm {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else None


@dataclass(frozen=True)
class Launcher:
    """What may restart a run."""

    name: str
    is_seen: bool  # alive; that of another host, or a queue, cannot be seen from here


def launcher_of(run_dir: Path) -> Launcher | None:
    """Return what may restart the newest process of a run; None where nothing would."""
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
    """Say whether a launcher has restarted this process."""
    return any(os.environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def _claim(path: Path) -> tuple[RunDirectory, DirectoryLock]:
    try:
        require_no_dangling_link("run.dir", path)
        is_made = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # so that a power cut does not lose the directory itself
            sync_directory(path.parent)
        names = [] if (path / CONFIG).exists() else sorted(one.name for one in path.iterdir())
        if unexpected := [name for name in names if name != LOCK and not is_left_over(name)]:
            why = f"holds files that are not a run ({', '.join(unexpected[:3])}): choose another directory"
            if JOURNAL in unexpected:
                why = f"holds a run whose {CONFIG} is missing: put it back, or choose another directory"
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
