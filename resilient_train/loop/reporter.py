"""What a run reports: numbers during the run; at its end a status, a summary, a review, and the last uploads.

The command reports its end itself. The caller's loop may come to its last step, give up, be asked to stop or be closed;
of a `break`, or an error of the caller's, it learns only at the exit of the interpreter.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from resilient_train.core.checks import Checks
from resilient_train.core.state import Clock
from resilient_train.data.history import BestLevel, UpdateHistory
from resilient_train.durable import endings
from resilient_train.durable.endings import LOOP, SUMMARY, RunFacts, Summary, status_of
from resilient_train.durable.incident_log import INCIDENTS, IncidentLog
from resilient_train.durable.journal import JOURNAL, METRICS, commit_json
from resilient_train.durable.lock import DirectoryLock
from resilient_train.durable.progress import Doing, Progress
from resilient_train.durable.run_history import RunHistory
from resilient_train.ground.errors import (
    ConfigError,
    DirectoryInUse,
    GaveUp,
    Stopped,
    TrainError,
    in_one_line,
    short_message,
    unusable,
)
from resilient_train.ground.files import siblings
from resilient_train.ground.reader import DiskConfig
from resilient_train.ground.types import Vitals, fact
from resilient_train.ground.wording import log, say
from resilient_train.processes.world import World, is_lost_device, is_lost_peer
from resilient_train.report import tracker as tracking
from resilient_train.report.connection import locate
from resilient_train.report.story import command, completed, read_story, review, where_to_look
from resilient_train.report.tracker import EXPERIMENT, Tracker, TrackingConfig

REPORT_EVERY = 10  # accepted updates of the caller's loop
_JUDGED_AFTER = 50  # steps: before, a loss that has not fallen means nothing
_LEAST_FALL = 0.02  # share of the first loss
_LEARNED = 0.1  # of the same: with less, a rate that a trial has found does no good
_WELL = 0.9  # of the same: with more, a rate does well that was compared with no other
_TIMED = 10_000  # laps from which the median step time is taken

_DRAIN_S = 30.0  # how long the end of a loop waits for MLflow at most

holders: dict[Path, RunReporter] = {}  # of this process, by run directory
os.register_at_fork(after_in_child=holders.clear)  # a forked child reports nothing


@dataclass(frozen=True)
class Place:
    incident_log: IncidentLog
    directory: Path | None = None  # None on every rank of a loop without a run directory
    lock: DirectoryLock | None = None  # of rank 0
    tracking: TrackingConfig | None = None
    rank: int | None = None  # in the caller's loop; the command reports its end itself
    tracker: Tracker = field(default_factory=Tracker)  # of the command


def place(run_dir: str | Path | None, world: World, resumes: bool, tracking: Any, disk: DiskConfig) -> Place:
    """Begin a journal in the named directory, or in a sibling if it holds a run that is not to be resumed."""
    if run_dir is None:
        if resumes or tracking or disk.every:
            raise unusable("run_dir", "is missing: resume, tracking and disk need one")
        return Place(IncidentLog(None), rank=world.rank)
    named, locks = Path(run_dir).absolute(), list[DirectoryLock]()
    store = world.on_main(lambda: _tracking(tracking, named))
    path = world.on_main(lambda: _claim(named, locks, resumes=resumes))
    if path != named:
        log.info("%s holds another run: this one writes to %s", run_dir, path)
    try:
        incident_log = IncidentLog(path, writes=world.is_main)
    except BaseException:
        for lock in locks:
            lock.release()
        raise
    return Place(incident_log, path, locks[0] if locks else None, store, world.rank)


def _tracking(given: str | bool | None, run_dir: Path) -> TrackingConfig | None:
    if given is None or given is False:
        return None
    if find_spec("mlflow") is None:
        raise unusable("tracking", "needs the package mlflow: pip install 'resilient-train[app]'")
    uri = None if given is True else given
    locate(uri, run_dir.parent)
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    return TrackingConfig("mlflow", uri, experiment, drain_s=_DRAIN_S)


def _claim(named: Path, locks: list[DirectoryLock], *, resumes: bool) -> Path:
    """Lock the named directory, or the first sibling without a run; two processes may begin at the same time."""
    for path in siblings(named):
        try:
            path.mkdir(parents=True, exist_ok=True)
            if resumes or not (path / INCIDENTS).exists():
                if not resumes:
                    os.close(os.open(path / JOURNAL, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                locks.append(DirectoryLock(path))
                return path
        except DirectoryInUse as error:
            if not error.holder.startswith(f"process {os.getpid()} "):
                raise
            advice = "call its close() first, or restart the process"
            raise DirectoryInUse(path, "another guard of this process", advice) from None
        except FileExistsError:
            if not path.is_dir():
                raise ConfigError("run_dir", named, "is a file, expected a directory") from None
        except OSError as error:
            raise ConfigError("run_dir", named, f"cannot be written: {error.strerror}") from None
    raise AssertionError


def write_end(summary: Summary, incident_log: IncidentLog, run_dir: Path) -> None:
    incident_log.tell("end", summary=asdict(summary))
    write_summary(summary, run_dir)


def write_summary(summary: Summary, run_dir: Path) -> None:
    try:
        commit_json(run_dir / SUMMARY, asdict(summary))
    except OSError as error:
        log.error("%s cannot be written: %s", run_dir / SUMMARY, error.strerror or error)


def note_error(run_dir: Path, rank: int, error: BaseException, *, in_training: bool) -> None:
    """Leave a note for rank 0 of what failed on this rank, unless rank 0 knows it."""
    # That a GPU was lost explains nothing: its samples may be to blame.
    if not (isinstance(error, GaveUp | Stopped) or is_lost_peer(error) or is_lost_device(error)):
        endings.note_failure(run_dir, rank, short_message(error), in_training=in_training)


def print_review(run_dir: Path, history: RunHistory | None = None) -> None:
    if not run_dir.is_dir():
        log.error("the run directory is gone: %s", run_dir)
        return
    try:
        story = read_story(run_dir, history)
        lines = review(story) + [f"for the full report: {command('incidents', run_dir)}"] * bool(story.incidents)
    except Exception as error:  # a damaged file does not change how the run ended
        lines = [f"the review of the run failed: {in_one_line(error)}"]
    for line in lines:
        log.info("%s", line)


def conclude(summary: Summary, incident_log: IncidentLog, run_dir: Path, tracker: Tracker) -> None:
    """Print the review of a run, upload the rest, print where MLflow shows it, and note that in the summary."""
    incident_log.close_files()
    if summary.status == "completed":
        log.info("%s", completed(summary))
    print_review(run_dir, incident_log)
    if (run := tracker.finish()) is not None:
        if run["url"] is not None:
            log.info("%s", where_to_look(run["tracking_uri"], run["url"]))
        summary.mlflow = run
        write_summary(summary, run_dir)


@dataclass(eq=False)
class RunReporter:
    """Reports a run. It has no reference to the guard, which may be deleted while the process continues."""

    clock: Clock
    updates: UpdateHistory
    best: BestLevel
    checks: Checks
    place: Place  # with a lock only on rank 0 of the caller's loop
    progress: Progress
    evaluated: dict[str, float] | None = None  # perhaps by the previous process
    _reported_tick: int = 0
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMED))  # the mean of each lap
    _lap_started: float = 0.0
    _lap_tick: int = 0
    _began: float = field(default_factory=time.monotonic)
    _ending: Summary | None = None  # as written
    _is_over: bool = True  # everything is reported

    def __post_init__(self) -> None:
        self.tracker = self.place.tracker
        self.place.incident_log.sinks.append(self.tracker)

    # During the run.

    def begin(self, steps: int | None) -> None:
        """Note that a loop of so many updates begins, if that is known; an end that was written before is void."""
        self.start_lap()
        place, directory = self.place, self.place.directory
        if directory is None:
            return
        is_new, self._is_over, self._ending = self._is_over, False, None
        if place.lock is None:
            return
        endings.begin(directory, is_finished=False)  # before another rank may have failed again
        with suppress(OSError):  # the disk is full
            commit_json(directory / LOOP, {"steps": steps})
        if is_new and place.tracking is not None:  # else the tracker is at work, and two would write to one file
            sinks = self.place.incident_log.sinks
            sinks[:] = [one for one in sinks if one is not self.tracker]
            self.tracker = tracking.build(place.tracking, directory, directory.parent, {"steps": steps})
            sinks.append(self.tracker)

    def start_lap(self) -> None:
        self._lap_started = time.perf_counter()

    def _lap(self) -> float:
        """Return the mean seconds of the updates since the last lap: only there the clocks of host and GPU agree."""
        ticks, began = self.clock.tick - self._lap_tick, self._lap_started
        self._lap_tick = self.clock.tick
        self.start_lap()
        if not ticks:
            return 0.0
        self._step_seconds.append((self._lap_started - began) / ticks)
        return self._step_seconds[-1]

    def report(
        self, newest: Vitals | None, read: Callable[[], dict[str, float]], samples: int
    ) -> dict[str, float] | None:
        """Return the numbers of the newest update, of `samples` samples; None if they were reported already."""
        if newest is None or newest.tick == self._reported_tick:
            return None
        self._reported_tick = newest.tick
        values = {"loss": newest.loss, "grad_norm": newest.grad_norm, "lr": newest.lr, "step": newest.step}
        values |= {f"train/{name}": value for name, value in read().items()}
        if seconds := self._lap():
            values |= {"step_ms": 1e3 * seconds, "samples_per_second": samples / seconds}
        return values | {"incidents_total": len(self.place.incident_log.incidents)}

    def show(self, values: Mapping[str, float]) -> None:
        """Upload the numbers of the update that was reported last."""
        self.place.incident_log.tell(METRICS, tick=self._reported_tick, values=dict(values))

    def note_evaluation(self, metrics: Mapping[str, float]) -> None:
        self.evaluated = dict(metrics)
        values = {f"validation/{name}": value for name, value in metrics.items()}
        self.place.incident_log.tell(METRICS, tick=self.clock.tick, values=values)
        if self._ending is not None and not self._is_over:  # many evaluate after the loop
            self._ending.eval = self.evaluated
            write_summary(self._ending, self.directory)

    # At the end.

    def summary(self, ended: RunFacts, digests: tuple[str, str] | None = None) -> Summary:
        """Sum up the run at its end; `ended` says how the loop or the process ends."""
        incident_log, (weights, state) = self.place.incident_log, digests or (None, None)
        best, trials = None, incident_log.effects.get("trials", {})
        has_rate = any(one.tried for one in incident_log.incidents)  # which a trial has found
        if not self.updates.has_turns:
            best = self.best.left(had_incidents=bool(incident_log.of_training))
        facts = replace(
            ended,
            incidents=incident_log.incidents,
            step=self.clock.step,
            is_stalled=not self._has_fallen(_LEARNED if has_rate else _LEAST_FALL),
            is_above_best=best is not None,
            is_unjudged=trials.get("unjudged", False) and not self._has_fallen(_WELL),
        )
        return Summary(
            **status_of(facts).written(),
            steps=self.clock.step,
            ticks=self.clock.tick,
            steps_lost=self.clock.tick - self.clock.step,
            trial_updates=int(trials.get("updates", 0)),
            final_loss=self.updates.recent_loss,
            first_loss=self.updates.first_loss,
            best_level=None if best is None else {"from": best.start, "to": best.stop, "loss": best.level},
            eval=self.evaluated,
            incidents=incident_log.tally(),
            seconds=round(time.monotonic() - self._began, 3),
            step_ms=1e3 * median(self._step_seconds) if self._step_seconds else None,
            weights_sha256=weights,
            state_sha256=state,
        )

    def _has_fallen(self, share: float) -> bool:
        """Say whether the loss fell by a share of the first one; yes where that says nothing: the sum of opposed losses
        need not fall, nor a reward's, nor another one.
        """
        first, final = self.updates.first_at_most, self.updates.recent_loss
        if self.updates.has_turns or self.checks.is_changed or self.best.has_negative:
            return True
        if first is None or final is None or self.clock.step < _JUDGED_AFTER:
            return True
        return final < first - share * abs(first)

    def end(self, ended: RunFacts, digests: tuple[str, str] | None = None) -> None:
        """Write how the caller's loop ended, unless that was written already."""
        place, error = self.place, ended.error
        if place.lock is None:
            self._is_over = True
        is_only_told = place.directory is None and place.rank == 0
        if (self._is_over and not is_only_told) or self._ending is not None:
            return
        is_lost = error is not None and is_lost_peer(error)
        if is_lost:
            ended = replace(ended, failure=endings.failure(place.directory))
        self._ending = ending = self.summary(ended, digests)
        if is_only_told:
            place.incident_log.tell("end", summary=asdict(ending))
            total = ending.incidents["total"]
            log.info("%s", say(fact("unwritten", verdict=ending.verdict, steps=ending.steps, total=total)))
            return
        # Of a loss without an explanation, the progress stays as if this process was killed.
        if ended.failure or not (is_lost or is_lost_device(error)):
            self.progress.turned_to(Doing.ENDED)
        write_end(ending, place.incident_log, self.directory)

    def fail(self, error: BaseException) -> None:
        self._finish(RunFacts(error=error))

    def _finish(self, ended: RunFacts) -> None:
        """Report how the loop ended; of an error, a rank other than 0 leaves a note for rank 0."""
        if ended.error is not None and self.place.rank and not self._is_over:
            note_error(self.directory, self.place.rank, ended.error, in_training=True)
        self.end(ended)
        self.conclude()

    def conclude(self) -> None:
        if self.place.lock is None or self._ending is None or self._is_over:
            return
        self._is_over = True
        conclude(self._ending, self.place.incident_log, self.directory, self.tracker)

    def closed(self, error: BaseException | None, planned: int | None) -> None:
        """Report that the caller closed the loop, perhaps by an error."""
        error = None if isinstance(error, GeneratorExit) else error
        self._finish(RunFacts(error=error, is_closed=True, planned=planned or 0))
        self.place.incident_log.close_sinks()
        self.progress.close()
        if self.place.lock is not None:  # let another process resume in the directory
            self.place.lock.release()

    def left_state(self, path: Path | None) -> None:
        """Report where the state at the end was written; a loop that was asked to stop ends with this."""
        if self.place.lock is None:
            return
        if path is not None and self._ending is not None:
            log.info("the state at step %s is in %s", f"{self.clock.step:,}", path)
        elif self._ending is not None and self._ending.status == "preempted":
            self._ending, error = None, TrainError("it was asked to stop, and no state could be written")
            log.error("%s", error)
            self.end(RunFacts(error=error))
        self.conclude()

    def left(self, error: BaseException | None) -> None:
        """Report at the exit of the process what was not reported before; `error` is what it exits with."""
        if self._is_over:
            return
        if error is None and self.place.rank:  # by a break that was meant, or by sys.exit(1), which leaves no trace
            endings.note_failure(self.directory, self.place.rank, "left its loop, without an error", in_training=True)
        # The directory stays locked until the process has ended: something may still be written.
        self._finish(RunFacts(error=error, is_closed=False))
        self.place.incident_log.close_sinks()

    @property
    def directory(self) -> Path:
        assert self.place.directory is not None
        return self.place.directory


def log_to_stderr(world: World) -> None:
    """Print incidents in a program that has not set up logging, until it does."""
    if not log.handlers and log.level == logging.NOTSET and not logging.getLogger().handlers:
        log.setLevel(logging.INFO if world.is_main else logging.ERROR)  # the other ranks would print the same
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("resilient_train: %(message)s"))
        handler.addFilter(lambda record: not (logging.getLogger().handlers or getattr(record, "in_file_only", False)))
        log.addHandler(handler)


@atexit.register
def _at_exit() -> None:
    """The interpreter has an error that was not caught."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    for one in list(holders.values()):
        try:
            one.left(error)
        except Exception as failed:
            log.error("the end of the loop in %s could not be reported: %s", one.place.directory, in_one_line(failed))
