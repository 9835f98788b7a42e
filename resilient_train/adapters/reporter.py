"""What a guard tells of its loop: its numbers on the way, and in the end a summary, a review and MLflow.

A run of ours says its end itself. A loop of somebody's own may come to its last step, give up, be asked to stop, be
left by a `break` or by an error: what it does not say is found out when its process ends.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilient_train.adapters.place import Place
from resilient_train.errors import GaveUp, Stopped, TrainError, in_one_line, short_message
from resilient_train.passed import UpdateHistory
from resilient_train.ranks.world import is_lost_peer
from resilient_train.record import endings
from resilient_train.record.endings import LOOP, Loop, StepTimes, Summary, verdict_of
from resilient_train.record.incident_log import INCIDENTS, IncidentLog
from resilient_train.record.progress import Doing, Progress
from resilient_train.record.review import review, where_to_look
from resilient_train.record.story import read_story
from resilient_train.state.run_state import Clock
from resilient_train.tracking import uploads as tracking
from resilient_train.tracking.uploads import NullTracker, Tracker
from resilient_train.types import Vitals
from resilient_train.wording import duration, log

REPORT_EVERY = 10  # accepted updates of a loop of somebody's own

CLOSED = "closed"  # by its program, before the planned total
_LEFT = "ended"  # nobody said why: a break that was meant, or sys.exit(1), which leaves no trace
_open: set[Chronicle] = set()  # of loops whose end nobody has said yet


@dataclass(frozen=True, slots=True)
class Told:
    """An update that is worth telling."""

    vitals: Vitals
    metrics: Mapping[str, float]  # that the objective reports beside its loss
    values: dict[str, float]  # all of it, as a tracker takes it


@dataclass(eq=False)
class Chronicle:
    """Holds nothing of the guard, which may go while the process stays."""

    clock: Clock
    incidents: IncidentLog
    updates: UpdateHistory
    place: Place  # without a lock where somebody else tells the end, and on ranks that write nothing
    progress: Progress
    tally: StepTimes = field(default_factory=StepTimes)
    evaluated: Mapping[str, float] | None = None
    _told_tick: int = 0
    _began: float = field(default_factory=time.monotonic)
    _tracker: Tracker = field(default_factory=NullTracker)
    _ending: Summary | None = None  # that was said
    _is_over: bool = True  # all is said that there was to say
    _process: int = field(default_factory=os.getpid)  # a child that it forks has no say
    _lock: Any = field(default_factory=threading.RLock)

    @property
    def tells_end(self) -> bool:
        """Say whether this process does."""
        return self.place.lock is not None

    def belongs_to(self, guard: object) -> None:
        """Tell the end of a loop whose guard is gone: in a thread, as it may go in the midst of something else."""
        if self.place.directory is not None:
            _open.add(self)
        if self.tells_end:
            gone = weakref.finalize(guard, lambda: threading.Thread(target=self.left, name="chronicle").start())
            gone.atexit = False  # then another one asks, which knows of errors

    # On the way.

    def begin(self, steps: int, given: Mapping[str, Any]) -> None:
        """A loop of so many updates begins; what was said of an earlier end holds no more."""
        self.tally.start_lap()
        if self.place.directory is None:
            return
        _open.add(self)
        is_new, self._is_over, self._ending = self._is_over, False, None
        if not self.tells_end:
            return
        endings.begin(self._directory, is_finished=False)  # before another rank may have failed again
        with suppress(OSError):  # a full disk: the loop goes on without
            Loop(steps, self.place.goes_on, given).write(self._directory)
        if is_new:  # else the tracker is at work, and two would write to one file
            self._begin_tracking(given)

    def report(
        self, newest: Vitals | None, read: Callable[[], dict[str, float]], samples: int, knobs: Mapping[str, float]
    ) -> Told | None:
        """Put together what is known of the newest update, of `samples` samples; None if it was told already.

        `read` reads what the objective reports.
        """
        if newest is None or newest.tick == self._told_tick:
            return None
        self._told_tick, metrics = newest.tick, read()
        values = {"loss": newest.loss, "grad_norm": newest.grad_norm, "lr": newest.lr, "step": newest.step}
        values |= {f"train/{name}": value for name, value in metrics.items()}
        if seconds := self.tally.lap(self.clock.tick):
            values |= {"step_ms": 1e3 * seconds, "samples_per_second": samples / seconds}
        values |= {f"knobs/{name}": value for name, value in knobs.items()}
        return Told(newest, metrics, values | {"incidents_total": len(self.incidents.incidents)})

    def went_on(self, told: Told | None) -> None:
        """Show an update of a loop of somebody's own, or take note of the time alone."""
        if told is None:
            self.tally.lap(self.clock.tick)
            return
        self._tracker.begin()  # MLflow may load now; before, it would have kept the first updates waiting
        self._tracker.metrics(told.vitals.tick, told.values)

    def note_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Take note of an evaluation."""
        self.evaluated = dict(metrics)
        self._tracker.metrics(self.clock.tick, {f"eval/{name}": value for name, value in metrics.items()})
        if self._ending is not None and not self._is_over:  # behind the loop, where one often does
            self._ending.eval = self.evaluated
            self._write(self._ending)

    # In the end.

    def summary(self, status: str, exit_code: int, seconds: float, digests: tuple[str, str] | None = None) -> Summary:
        """What summary.json has to say of an end; `digests` are those of the weights and of the whole state."""
        losses = self.updates.first_loss, self.updates.recent_loss
        return Summary(
            status=status,
            exit_code=exit_code,
            steps=self.clock.step,
            ticks=self.clock.tick,
            steps_lost=self.clock.tick - self.clock.step,
            final_loss=self.updates.recent_loss,
            first_loss=self.updates.first_loss,
            verdict=verdict_of(status, self.incidents.incidents, self.clock.step, losses),
            eval=None if self.evaluated is None else dict(self.evaluated),
            incidents=self.incidents.tally(),
            seconds=round(seconds, 3),
            step_ms=self.tally.step_ms,
            weights_sha256=digests[0] if digests else None,
            state_sha256=digests[1] if digests else None,
            mlflow=None,
        )

    def end(
        self,
        status: str,
        exit_code: int = 0,
        error: BaseException | None = None,
        digests: tuple[str, str] | None = None,
    ) -> None:
        """Write down how the loop ended, unless that was said already."""
        with self._lock:
            if not self.tells_end:
                self._is_over = True
            if self._is_over or self._ending is not None:
                return
            ending = self.summary(status, exit_code, time.monotonic() - self._began, digests)
            why = endings.failure(self._directory) if error is not None and is_lost_peer(error) else None
            ending.why = why or (None if error is None else short_message(error))
            if error is None or why or not is_lost_peer(error):  # else the record stays as if this process was killed
                self.progress.turned_to(Doing.ENDED)
            self._ending = ending
            self._write(ending)

    def fail(self, error: BaseException) -> None:
        """Write down that an error ended the loop, and tell all of it; ranks other than 0 leave a note of theirs."""
        if self.place.rank and not (self._is_over or isinstance(error, GaveUp | Stopped) or is_lost_peer(error)):
            endings.note_failure(self._directory, self.place.rank, short_message(error), in_training=True)
        status = {GaveUp: "gave_up", Stopped: "preempted"}.get(type(error), "failed")
        self.end(status, error.exit_code if isinstance(error, TrainError | Stopped) else 1, error)
        self.conclude()

    def conclude(self) -> None:
        """Tell of an end what a person wants to know, and MLflow."""
        with self._lock:
            if not self.tells_end or self._ending is None or self._is_over:
                return
            self._is_over = True
            _open.discard(self)
            for line in self._farewell(self._ending):
                log.info("%s", line)
            self._finish_tracking(self._ending)

    def closed(self, error: BaseException | None, planned: int | None) -> None:
        """Take note that the program ends the loop, at a step of its choice, or because of the error it deals with."""
        with self._lock:
            if error is not None and not isinstance(error, GeneratorExit):
                self.fail(error)
            self.end("completed" if planned is None or self.clock.step >= planned else CLOSED)
            self.conclude()
            self.let_go()

    def left_state(self, path: Path | None) -> None:
        """Take note that the state at the end was written; of a loop that was asked to stop it is the last word."""
        if not self.tells_end:
            return
        if path is not None and self._ending is not None:
            log.info("the state at step %s is in %s", f"{self.clock.step:,}", path)
        elif self._ending is not None and self._ending.status == "preempted":
            self._ending.status, self._ending.exit_code = "failed", 1
            self._ending.why = "it was asked to stop, and no state could be written"
            log.error("%s", self._ending.why)
            self._write(self._ending)
        self.conclude()

    def left(self, error: BaseException | None = None) -> None:
        """Tell what nobody has told, as the loop cannot be gone on with; `error` is what its process ends with."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if error is not None and self._ending is None:
                self.fail(error)
            else:
                if self.place.rank and not self._is_over:
                    why = "left its loop, without an error"
                    endings.note_failure(self._directory, self.place.rank, why, in_training=True)
                self.end(_LEFT, exit_code=1)
                self.conclude()
            self.let_go()

    def let_go(self) -> None:
        """Let another process go on in the directory."""
        _open.discard(self)
        if self.place.lock is not None:
            self.place.lock.release()

    # How it is done.

    @property
    def _directory(self) -> Path:
        assert self.place.directory is not None
        return self.place.directory

    def _write(self, ending: Summary) -> None:
        try:
            ending.write(self._directory / endings.SUMMARY)
        except OSError as error:
            log.error("%s cannot be written: %s", self._directory / endings.SUMMARY, error.strerror or error)

    def _farewell(self, ending: Summary) -> list[str]:
        """The same review that a run of ours ends with."""
        try:
            lines = review(read_story(self._directory))
        except Exception as error:  # it has ended as it has, whatever lies there
            lines = [f"what it met cannot be told: {in_one_line(error)}"]
        if ending.status != "completed":
            return lines
        results = {"recent loss": ending.final_loss}
        results |= {f"evaluation {name}": value for name, value in (ending.eval or {}).items()}
        told = ", ".join(f"{name} {value:.4g}" for name, value in results.items() if value is not None)
        return [f"completed {ending.steps:,} steps in {duration(ending.seconds)}{f': {told}' if told else ''}", *lines]

    def _begin_tracking(self, given: Mapping[str, Any]) -> None:
        if self.place.tracking is None:
            return
        directory = self._directory
        self._tracker = tracking.build(self.place.tracking, directory, directory.parent)
        self._tracker.params(given)
        self._tracker.artifact(directory / LOOP)

    def _finish_tracking(self, ending: Summary) -> None:
        if isinstance(self._tracker, NullTracker):
            return
        if (self._directory / INCIDENTS).exists():
            self._tracker.artifact(self._directory / INCIDENTS)
        if (run := self._tracker.finish(ending.status)) is not None:
            ending.mlflow = run.as_dict()
            self._write(ending)
            for line in where_to_look(tracking.ui_command(run.tracking_uri), run.url):
                log.info("%s", line)


@atexit.register
def _at_exit() -> None:
    """Tell how loops ended that did not say so: the interpreter knows of an error that nobody has caught."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    for one in list(_open):
        one.left(error)
