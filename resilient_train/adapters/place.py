"""The run directory of the caller's loop, and the MLflow store that shows it."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from resilient_train.errors import ConfigError, DirectoryInUse, TrainError, named_type, unusable
from resilient_train.ranks.lock import DirectoryLock, refuse_dangling_link
from resilient_train.ranks.world import World
from resilient_train.record.incident_log import INCIDENTS, IncidentLog
from resilient_train.record.journal import JOURNAL
from resilient_train.tracking.store import locate
from resilient_train.tracking.tracker import EXPERIMENT, TrackingConfig
from resilient_train.update.schedule import Curve, CurveSchedule, LoopSchedule, Schedule, ShadowSchedule
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
    return TrackingConfig("mlflow", uri, experiment, drain_s=_DRAIN_S)


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


def schedules(given: Any, optimizers: list[Optimizer]) -> list[Schedule]:
    """Convert a schedule, or a list with one for each optimizer: None, a function `step -> factor`, or a scheduler."""
    several = list(given) if isinstance(given, list | tuple) else [given] * len(optimizers)
    if len(several) != len(optimizers):
        raise ValueError(f"schedule: {len(several)} schedules for {len(optimizers)} optimizers")
    return [_schedule(one, optimizer) for one, optimizer in zip(several, optimizers, strict=True)]


def _schedule(given: Any, optimizer: Optimizer) -> Schedule:
    if isinstance(given, AcceleratedScheduler):
        is_alone = given.split_batches or not given.step_with_optimizer
        return _Strided(_torchs(given.scheduler, optimizer), 1 if is_alone else int(PartialState().num_processes))
    if isinstance(given, LRScheduler | ReduceLROnPlateau):
        return _torchs(given, optimizer)
    if hasattr(given, "settings") and hasattr(given, "state_dict"):
        return given  # type: ignore[no-any-return]
    if given is None:
        return LoopSchedule([group["lr"] for group in optimizer.param_groups])
    curve: Curve = given
    try:
        first = curve(0)
    except TypeError:
        first = math.nan
    if not (isinstance(first, int | float) and math.isfinite(first)):
        expected = "expected a torch scheduler or a callable (step) -> factor of the configured rate"
        raise TypeError(f"schedule: {expected}, got {given!r:.80}")
    return CurveSchedule([group["lr"] for group in optimizer.param_groups], curve, 0)


def _torchs(given: Any, optimizer: Optimizer) -> ShadowSchedule:
    if isinstance(given, ReduceLROnPlateau):
        raise TypeError("schedule: ReduceLROnPlateau follows a metric, not the step, and is not supported")
    its_own = getattr(given, "optimizer", None)
    if (its_own.optimizer if isinstance(its_own, AcceleratedOptimizer) else its_own) is not optimizer:
        several = "give a list with a schedule for each optimizer, in their order, None for a constant rate"
        raise ValueError(f"schedule: this {type(given).__name__} was made for another optimizer; {several}")
    return _Watched.of(given, optimizer)


class _Watched(ShadowSchedule):
    """Notices if the loop still steps its scheduler."""

    _left_at: list[Any] | None = None  # counts of the scheduler when the guard had stepped it

    def advance(self, step: int) -> None:
        if self._left_at is not None and self._left_at != self._counts():
            why = "remove scheduler.step(), the guard does it when an update is accepted"
            raise TrainError(f"the loop stepped the scheduler itself: {why}")
        super().advance(step)
        self._left_at = self._counts()

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self._left_at = self._counts()

    def _counts(self) -> list[Any]:
        several = [self.scheduler, *getattr(self.scheduler, "_schedulers", [])]
        return [getattr(one, "last_epoch", None) for one in several]


class _Strided:
    """A schedule that takes several steps for one update, as Accelerate's schedulers do with several processes."""

    def __init__(self, inner: ShadowSchedule, stride: int) -> None:
        self.inner, self.stride = inner, stride
        self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict

    def settings(self, step: int) -> Sequence[dict[str, Any]]:
        return self.inner.settings(self._at(step))

    def advance(self, step: int) -> None:
        self.inner.advance(self._at(step))

    def _at(self, step: int) -> int:
        """Limit the step to what a one-cycle schedule was made for: it would raise."""
        return min(step * self.stride, getattr(self.inner.scheduler, "total_steps", sys.maxsize))
