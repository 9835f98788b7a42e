"""The run directory of the caller's loop, and the MLflow store that shows it."""

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
from resilient_train.tracking.tracker import EXPERIMENT, TrackingConfig
from resilient_train.wording import log

_DRAIN_S = 30.0  # how long the end of a loop waits for MLflow at most


@dataclass(frozen=True)
class Place:
    """Where a guard writes to."""

    incident_log: IncidentLog
    directory: Path | None = None  # None on every rank of a loop without a run directory
    lock: DirectoryLock | None = None  # of rank 0
    tracking: TrackingConfig | None = None
    resumes: bool = False  # if the same program is started again
    rank: int = 0


def place(run_dir: str | Path | None, world: World, resumes: bool = False, tracking: str | bool | None = None) -> Place:
    """Begin a journal in a run directory: the named one, or a sibling if that holds a run already.

    With `resumes` it is the named one in any case. No other process may be at work in it.
    """
    if run_dir is None:
        if resumes:
            raise unusable("resume", "needs a run_dir to resume from")
        if tracking:
            raise unusable("tracking", "needs a run_dir: what MLflow shows is written there first")
        return Place(IncidentLog(None))
    named, locks = Path(run_dir).absolute(), list[DirectoryLock]()
    store = world.on_main(lambda: _tracking(tracking, named))
    world.on_main(lambda: refuse_dangling_link("run_dir", named))
    path = world.on_main(lambda: _claim(named, locks, resumes=resumes))
    if path != named:
        log.info("%s holds another run: this one writes to %s", run_dir, path)
    try:
        incident_log = IncidentLog(path if world.is_main else None, run_dir=path)
    except BaseException:
        for lock in locks:
            lock.release()
        raise
    return Place(incident_log, path, next(iter(locks), None), store, resumes, world.rank)


def _tracking(given: str | bool | None, run_dir: Path) -> TrackingConfig | None:
    """Convert an address of MLflow, or True: the one of the environment, else a database next to the run."""
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


def _claim(named: Path, locks: list[DirectoryLock], *, resumes: bool) -> Path:
    """Lock the named directory, or the first sibling without a run; two processes may begin at the same time."""
    path = named
    for number in itertools.count(2):
        try:
            path.mkdir(parents=True, exist_ok=True)
            if resumes or not (path / INCIDENTS).exists():
                if not resumes:
                    os.close(os.open(path / JOURNAL, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                locks.append(DirectoryLock(path))
                return path
        except DirectoryInUse as error:
            if error.holder.startswith(f"process {os.getpid()} "):  # a notebook whose cell is run again
                raise DirectoryInUse(path, "another guard of this process", "call its close() first") from None
            raise DirectoryInUse(path, error.holder, "wait for it to end, or choose another run_dir") from None
        except FileExistsError:
            if not path.is_dir():
                raise ConfigError("run_dir", named, "is a file, expected a directory") from None
        except OSError as error:
            raise ConfigError("run_dir", named, f"cannot be written: {error.strerror}") from error
        path = named.with_name(f"{named.name}-{number}")
    raise AssertionError
