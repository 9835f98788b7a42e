"""The run directory of the command: named, chosen, locked, and never overwritten."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilient_train.errors import ConfigError, DirectoryInUse
from resilient_train.files import commit_text, is_left_over, read_plain, remove, sync_directory
from resilient_train.ranks.lock import LOCK, DirectoryLock
from resilient_train.record.endings import CHECKPOINTS, CONFIG, SUMMARY, read_ending
from resilient_train.record.journal import JOURNAL
from resilient_train.record.run_history import history_of
from resilient_train.secrets import masked

_LAUNCH = ".launch"


@dataclass(frozen=True)
class RunDirectory:
    path: Path
    resumes: bool = False  # a run that began there
    finished: dict[str, Any] | None = None  # the summary of a run that is complete already, or gave up
    changes: dict[str, str] = field(default_factory=dict)  # of the configuration since that run began, by key

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    def log(self, rank: int) -> Path:
        return self.path / ("train.log" if rank == 0 else f"train.rank{rank}.log")


def claim(
    path: Path, *, steps: int, resume: str, changes: Callable[[Path], dict[str, str]]
) -> tuple[RunDirectory, DirectoryLock]:
    """Lock `path` for a run of `steps` updates. With `resume` never, lock the next sibling that is free.

    A directory without any update is reused; with `resume` never, if its start was refused. One that holds the complete
    run is returned with its summary, and so is one that gave up without `changes` to its config.yaml: it would give up
    again. Any other run resumes.
    """
    path = path.absolute()
    siblings = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    for candidate in itertools.chain([path], siblings):
        try:
            is_new, lock = _locked(candidate)
        except DirectoryInUse:
            if resume == "never":
                continue
            raise
        summary = read_ending(candidate, SUMMARY) or {}
        has_no_update = summary.get("ticks") == 0 and not (candidate / CHECKPOINTS).exists()
        was_refused = summary.get("status") == "failed" and summary.get("exit_code") == 2
        is_free = is_new or (has_no_update and (was_refused or resume != "never"))
        if resume == "never" and not is_free and not _was_launched_by_this(candidate):
            lock.release()
            continue
        found = RunDirectory(candidate)
        if not is_free:
            differs = changes(candidate / CONFIG)
            done, status = summary.get("steps"), summary.get("status")
            is_complete = isinstance(done, int) and done >= steps and status == "completed"
            is_finished = is_complete or (status == "gave_up" and not differs)
            is_same = resume == "auto" or (resume != "never" and masked(resume) in history_of(candidate).sources)
            if is_finished and is_same:
                return RunDirectory(candidate, finished=summary, changes=differs), lock
            found = RunDirectory(candidate, resumes=True, changes=differs)
        if (launch := _launch()) is not None:  # so that its restarts are recognized, and can be waited for
            commit_text(candidate / _LAUNCH, launch + "\n")
        return found, lock
    raise AssertionError("there is always another name")


def _locked(path: Path) -> tuple[bool, DirectoryLock]:
    """Lock a directory, which is made if needed; return whether it had no run, and the lock."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # so that a power cut does not lose the directory itself
            sync_directory(path.parent)
        is_new = not (path / CONFIG).exists()
        names = sorted(one.name for one in path.iterdir()) if is_new else []
        if unexpected := [name for name in names if name != LOCK and not is_left_over(name)]:
            why = f"holds files that are not a run ({', '.join(unexpected[:3])}): choose another directory"
            if JOURNAL in unexpected:
                why = f"holds a run whose {CONFIG} is missing: put it back, or choose another directory"
            raise ConfigError("run.dir", path, why)
        lock = DirectoryLock(path)
        for file in path.iterdir():
            if is_left_over(file.name):
                remove(file)
        return is_new, lock
    except OSError as error:
        raise ConfigError("run.dir", path, f"cannot be written: {error.strerror or error}") from error


def _launch() -> str | None:
    """Name what all restarts of one launch share; None if nothing restarts this process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        return f"agent {os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {parent}.{_began(parent)}"
    return f"slurm {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else None


def _began(process: int) -> str:
    """Return when a process began, in ticks since the boot, as its number may be in use again; "" if it is gone."""
    try:
        return read_plain(Path("/proc", str(process), "stat")).rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def _was_launched_by_this(run_dir: Path) -> bool:
    """Say whether this process is a restart by the launcher that started the run there."""
    restarts = [os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")]
    if restarts == ["0", "0"]:
        return False
    try:
        return read_plain(run_dir / _LAUNCH).decode(errors="replace").strip() == _launch()
    except OSError:
        return False


def was_launched(run_dir: Path) -> bool:
    """Say whether something that may restart it has started the newest process of a run."""
    return (run_dir / _LAUNCH).is_file()
