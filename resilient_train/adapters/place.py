"""The directory that the caller's loop writes to, and whether MLflow shows it."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from resilient_train.errors import ConfigError, DirectoryInUse, named_type, unusable
from resilient_train.ranks.lock import DirectoryLock, refuse_dangling_link
from resilient_train.ranks.world import World
from resilient_train.record.incident_log import INCIDENTS, IncidentLog
from resilient_train.record.journal import JOURNAL
from resilient_train.tracking.store import locate
from resilient_train.tracking.uploads import EXPERIMENT, TrackingConfig
from resilient_train.wording import log

_DRAIN_S = 30.0  # that the end of a loop waits for MLflow at most


@dataclass(frozen=True)
class Place:
    """What a guard keeps of it."""

    incident_log: IncidentLog
    directory: Path | None = None  # null where nothing is written down, on any rank
    lock: DirectoryLock | None = None  # of rank 0
    tracking: TrackingConfig | None = None
    goes_on: bool = False  # if the same program is started again
    rank: int = 0


def place(run_dir: str | Path | None, world: World, goes_on: bool = False, tracking: str | bool | None = None) -> Place:
    """Begin a journal in a run directory: the named one, or a sibling if that holds a run already.

    With `goes_on` it is the named one in any case. No other process may be at work in it.
    """
    if run_dir is None:
        if goes_on:
            raise unusable("resume", "needs a run_dir, where there is something to go on from")
        if tracking:
            raise unusable("tracking", "needs a run_dir: what MLflow is to show is written there first")
        return Place(IncidentLog(None))
    asked = world.on_main(lambda: _tracking(tracking, Path(run_dir).absolute()))  # all gather what rank 0 then tells
    locks: list[DirectoryLock] = []
    claimed = _locked if goes_on else _claimed
    world.on_main(lambda: refuse_dangling_link("run_dir", Path(run_dir).absolute()))
    path = world.on_main(lambda: claimed(Path(run_dir).absolute(), locks))
    if path != Path(run_dir).absolute():
        log.info("%s holds another run: this one writes to %s", run_dir, path)
    incident_log = IncidentLog(path if world.is_main else None, run_dir=path)
    return Place(incident_log, path, next(iter(locks), None), asked, goes_on, world.rank)


def _tracking(given: str | bool | None, run_dir: Path) -> TrackingConfig | None:
    """Take an address of MLflow, or True for the one that the environment names, else a database beside the run."""
    if given is None or given is False:
        return None
    if given is not True and not isinstance(given, str):
        raise TypeError(f"tracking: expected an address of MLflow or True, got {named_type(given)}")
    uri = None if given is True else given
    try:
        locate(uri, run_dir.parent)
    except ConfigError as error:
        raise ConfigError("tracking" if uri else error.key, error.value, error.why) from error
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    return TrackingConfig("mlflow", uri, experiment, system_metrics=False, drain_s=_DRAIN_S)


def _locked(path: Path, locks: list[DirectoryLock]) -> Path:
    """Take a directory for as long as this process is at work there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        locks.append(DirectoryLock(path))
    except DirectoryInUse as error:
        if error.holder.startswith(f"process {os.getpid()} "):  # as in a notebook, whose cell is run again
            raise DirectoryInUse(path, "another guard of this process", "let go of it first by its close()") from None
        raise DirectoryInUse(path, error.holder, "wait for it to end, or choose another run_dir") from None
    except OSError as error:
        raise ConfigError("run_dir", path, f"cannot be written: {error.strerror}") from error
    return path


def _claimed(wanted: Path, locks: list[DirectoryLock]) -> Path:
    """Make the journal in the first directory that holds no run, in one step: two runs may begin at a time."""
    path = wanted
    for number in itertools.count(2):
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not (path / INCIDENTS).exists():
                os.close(os.open(path / JOURNAL, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                return _locked(path, locks)
        except FileExistsError:
            if not path.is_dir():
                raise ConfigError("run_dir", wanted, "is a file, where a directory is wanted") from None
        except OSError as error:
            raise ConfigError("run_dir", wanted, f"cannot be written: {error.strerror}") from error
        path = wanted.with_name(f"{wanted.name}-{number}")
    raise AssertionError
