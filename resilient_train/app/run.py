"""One run from its directory to its summary: what surrounds the loop."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient_train import __version__
from resilient_train.app.build import Run, assemble, validate
from resilient_train.app.config.compose import Composed, is_fixed, told_changes
from resilient_train.app.terminal import Terminal
from resilient_train.app.train import train
from resilient_train.checkpoint import weights
from resilient_train.checkpoint.manifest import WEIGHTS
from resilient_train.checkpoint.resume import Resume
from resilient_train.diagnose.frames import called_by_us, is_users
from resilient_train.errors import (
    ConfigError,
    GaveUp,
    PeerEnded,
    RanksDiffer,
    Stopped,
    TrainError,
    in_one_line,
    short_message,
)
from resilient_train.files import commit_text
from resilient_train.ranks.lock import DirectoryLock
from resilient_train.ranks.process_exit import StopRequests, has_lost_sibling
from resilient_train.ranks.watchdog import Hang, Phase, Watchdog
from resilient_train.ranks.world import World, is_lost_peer
from resilient_train.record import endings, notes
from resilient_train.record.directory import RunDirectory, claim
from resilient_train.record.endings import Summary, last_good_of
from resilient_train.record.incident_log import INCIDENTS, IncidentLog
from resilient_train.record.review import command, review, where_to_look
from resilient_train.record.story import read_story
from resilient_train.state.randomness import set_deterministic
from resilient_train.tracking import uploads as tracking
from resilient_train.tracking.store import left_in
from resilient_train.tracking.uploads import NullTracker, TrackedRun, Tracker
from resilient_train.wording import GOOD, IN_FILE_ONLY, ODD, duration, log

_BEHIND_WATCHDOG_S = 60.0  # a collective that fails tells less than a watchdog
_LOADER = "torch/utils/data/dataloader.py"
_HOME = Path("runs")  # of MLflow's database, where no other is named
_FOR_OTHERS_S = 1.2  # until the watchdogs of other ranks have looked at their clocks, too


@dataclass(frozen=True)
class Ending:
    """How a run ended, for whoever started it."""

    exit_code: int
    loss: float | None  # of the evaluation if there was one, else of the training
    comes_to_nothing: bool = False  # it was refused before there was anything to keep


def run(composed: Composed) -> Ending:
    """Train as configured, in a directory of its own. An error becomes one line, a summary and an exit code."""
    config = composed.config
    limits = (config.run.start_timeout, config.run.step_timeout, config.run.save_timeout)
    limit = max(limits) + _BEHIND_WATCHDOG_S if all(limits) else 0.0
    world = World.joined(config.accelerate, start_timeout=config.run.start_timeout, limit=limit)
    terminal = Terminal(is_main=world.is_main)
    held: list[DirectoryLock] = []
    try:
        directory = world.on_main(lambda: _open(composed, held))
        if directory.finished is not None:
            ending = _already_complete(composed, directory, directory.finished, world)
        else:
            terminal.log_to(directory.log(world.rank))
            set_deterministic(config.run.deterministic)
            ending = _run(composed, world, terminal, directory)
            if ending.comes_to_nothing:
                terminal.close()
                directory.take_away()
        if ending.exit_code == 0:
            world.leave()
        return ending
    finally:
        terminal.close()
        for lock in held:
            lock.release()


def _open(composed: Composed, held: list[DirectoryLock]) -> RunDirectory:
    """Choose and lock the run directory: a decision of rank 0."""
    settings = composed.config.run
    directory, lock = claim(
        Path(settings.dir), steps=settings.steps, resume=settings.resume, is_unchanged=composed.is_unchanged
    )
    held.append(lock)
    if directory.finished is not None:
        if changes := composed.differences(directory.config):
            lock.release()
            why = f"holds a finished run of another configuration ({'; '.join(changes)}): choose another run.name"
            raise ConfigError("run.dir", directory.path, why)
    elif directory.goes_on:
        directory.changes = composed.changes(directory.config)
        if refused := [f"{key}: {how}" for key, how in directory.changes.items() if is_fixed(key)]:
            lock.release()
            why = f"holds a run that cannot go on with another {'; '.join(refused)}: choose another run.name"
            raise ConfigError("run.dir", directory.path, why)
    else:
        commit_text(directory.config, composed.yaml(directory.path))
    if not directory.goes_on:
        endings.begin(directory.path, is_finished=directory.finished is not None)
    return directory


def _run(composed: Composed, world: World, terminal: Terminal, directory: RunDirectory) -> Ending:
    one = _Session(composed, world, directory, terminal)
    status, error = "failed", None
    with StopRequests(composed.config.run.max_hours, is_in_loop=False) as requests:
        try:
            one.train(requests)
            status = "completed"
        except BaseException as caught:  # a SystemExit in a user's code, too: it is not the end that was asked for
            error = caught
            status = {GaveUp: "gave_up", Stopped: "preempted"}.get(type(caught), "failed")
        requests.is_in_loop = True  # what comes now is short, and is to be finished
        return one.end(status, error, requests)


class _Session:
    """What is built on the way into a run, as far as it got."""

    def __init__(self, composed: Composed, world: World, directory: RunDirectory, terminal: Terminal) -> None:
        self.composed, self.world, self.directory, self.terminal = composed, world, directory, terminal
        self.config, self.started = composed.config, time.monotonic()
        self.tracker: Tracker = NullTracker()
        self.incidents = IncidentLog(None)
        self.run: Run | None = None
        self.has_begun = not directory.goes_on
        self.went_on_from: int | None = None  # step of the process before this one

    def train(self, requests: StopRequests) -> None:
        """Build, take up where the run ended, train, and leave what has to be left."""
        settings, directory, composed = self.config.run, self.directory, self.composed
        if self.world.is_main:
            self.tracker = tracking.build(self.config.tracking, directory.path, _HOME.absolute())
        _greet(directory, self.world)
        self.incidents = IncidentLog(directory.path if self.world.is_main else None, place=directory.path)
        source = None if settings.resume in ("auto", "never") else Path(settings.resume)
        resume = Resume(source, composed.digest, tuple(directory.changes), self._mlflow_run)
        with self._watchdog(requests) as watchdog:
            self.run = run = assemble(self.config, self.world, self.incidents, resume, requests.asked, watchdog.beat)
            log.info("%s", run)
            if self.world.is_main:
                weights.describe(run.bare_model, directory.path)
            self._take_up(run)
            self.tracker.params(composed.params)
            self.tracker.artifact(directory.config)
            display = self.terminal.display(steps=settings.steps, done=run.guard.clock.step)
            requests.is_in_loop = True
            try:
                train(run, display, self.tracker, watchdog.beat)
                watchdog.beat(Phase.SAVE)
                step, left = run.guard.clock.step, run.guard.leave()
                if run.guard.stopped and left is None:  # what is proven may be there already
                    step, left = self.world.on_main(run.guard.leave_newest)
            finally:
                display.close()
                run.close()
            if run.guard.stopped:
                told = f"stopped at step {run.guard.clock.step:,}, asked by {requests.by or 'another'}"
                if left is None:
                    raise TrainError(f"{told}: no state could be written, the run begins again at step {step:,}")
                raise Stopped(f"{told}: the state is in {left}")
            self._save_weights(run, directory.path / WEIGHTS)

    def _watchdog(self, requests: StopRequests) -> Watchdog:
        """Somebody who looks at the clock, from before the first of a user's code runs."""
        settings = self.config.run
        limits = {
            Phase.START: settings.start_timeout,
            Phase.STEP: settings.step_timeout,
            Phase.SAVE: settings.save_timeout,
        }

        def saving_since() -> float | None:
            return self.run.guard.saving_since if self.run else None

        return Watchdog(limits, requests, settings.grace, saving_since, self._last_words, self.terminal.file)

    def end(self, status: str, error: BaseException | None, requests: StopRequests) -> Ending:
        """Say how it ended, to all who want to know."""
        directory, run, seconds = self.directory, self.run, time.monotonic() - self.started
        was_lost = False
        if error is not None and self._is_of_another(error):
            why, status = endings.failure(directory.path), "failed"
            was_lost = why is None
            ended = PeerEnded(why or "another process of this run ended; what it said is in its train.rank*.log")
            ended.__cause__, error = error, ended
        elif error is not None and status == "failed" and not self.world.is_main:
            endings.note_failure(directory.path, self.world.rank, short_message(error), in_training=self.has_begun)
        if run is not None and self.has_begun:  # else the record is still of the process before this one
            run.guard.ended(was_killed=was_lost)
        self.incidents.end()
        summary = _summary(status, _exit_code(error), seconds, run)
        if summary.weights_sha256 is not None:  # each rank's own, in its own log
            log.info("weights_sha256 %s", summary.weights_sha256, extra=IN_FILE_ONLY)
        _say(error, directory, self.world, run, seconds)
        if self.world.is_main:
            self._note(summary, error)  # before MLflow may take its time
            if self.has_begun and summary.ticks:
                self._review()
            if summary.ticks:  # a mistake in a configuration is nothing to track
                for file in (directory.log(0), directory.path / INCIDENTS):
                    if file.exists():
                        self.tracker.artifact(file)
                tracked = _finish(self.tracker, status, requests)
                summary.mlflow = tracked.as_dict() if tracked else None
                self._note(summary, error)
            else:
                self.tracker.drop()
        if isinstance(error, KeyboardInterrupt):
            raise error
        evaluated = run.evaluated if run else None
        loss = evaluated["loss"] if evaluated else summary.final_loss
        # Of several processes, or under a launcher, the directory is where the refusal is told.
        is_nothing = isinstance(error, ConfigError) and directory.is_new and run is None
        is_nothing = is_nothing and self.world.size == 1 and "WORLD_SIZE" not in os.environ
        return Ending(summary.exit_code, None if error else loss, is_nothing)

    def _review(self) -> None:
        """Say what a person wants to know in the end, as the directory tells it."""
        try:
            lines = review(read_story(self.directory.path), self.went_on_from)
        except Exception as error:  # it has ended as it has, whatever lies there
            lines = [f"what it met cannot be told: {in_one_line(error)}"]
        for line in lines:
            log.info("%s", line)

    def _is_of_another(self, error: BaseException) -> bool:
        """Say whether another process ended, of which this one has only seen a closed connection or a request."""
        if isinstance(error, Stopped):
            return self._was_asked_for_another()
        return self.world.size > 1 and is_lost_peer(error)

    def _was_asked_for_another(self) -> bool:
        """Say whether an agent asks to stop because another rank has failed: nobody wished it then."""
        if self.world.size == 1 or (self.run is not None and self.run.guard.stopped):  # all have agreed to it
            return False
        return endings.failure(self.directory.path) is not None or has_lost_sibling()

    def _note(self, summary: Summary, error: BaseException | None) -> None:
        """Write down how it ended; of a configuration that was refused, only that: the run stands where it stood."""
        if self.has_begun or not isinstance(error, ConfigError):
            _write(summary, self.directory)
        elif "WORLD_SIZE" in os.environ:  # a launcher makes another code of it
            endings.note_refusal(self.directory.path, error.exit_code, str(error))

    def _take_up(self, run: Run) -> None:
        """Go on where the run ended, with what has changed since; only now is the new configuration written down."""
        directory = self.directory
        for line in told_changes(directory.changes):
            log.info("changed: %s", line)
        if run.guard.resume():
            self.went_on_from = run.guard.clock.step
            log.info("resumes from step %d", self.went_on_from)
        elif directory.goes_on:
            log.info("the run there had no checkpoint yet: it begins at step 0 again")
        self.has_begun = True
        if directory.goes_on and self.world.is_main:
            endings.begin(directory.path, is_finished=False)
        if directory.changes and self.world.is_main:
            commit_text(directory.config, self.composed.yaml(directory.path))

    def _save_weights(self, run: Run, path: Path) -> None:
        tensors = weights.gathered(run.bare_model, keep=self.world.is_main)
        if not self.world.is_main:
            return
        try:
            weights.save(tensors, path)
        except OSError as error:
            why = "make room; the same command goes on from the newest checkpoint, if one could be written"
            raise TrainError(f"{path} cannot be written ({error.strerror or error}): {why}") from error

    def _mlflow_run(self) -> str | None:
        return self.tracker.run.run_id if self.tracker.run else None

    def _last_words(self, hang: Hang) -> int:
        """Write down where a run stands that does not go on; called in another thread, just before the end."""
        asked = "it was asked to stop, and " if hang.stop_asked else ""
        where = next((f for f in reversed(called_by_us(hang.frames)) if is_users(f.f_code.co_filename)), None)
        place = f"{where.f_code.co_filename}:{where.f_lineno}, in {where.f_code.co_name}" if where else _elsewhere(hang)
        evidence = f"{asked}no {hang.phase} was finished for {hang.seconds:.0f} s; it stands in {place}"
        # Of the many that wait for one, rank 0 speaks; where the user's own code stands is for everybody's eyes.
        level = logging.ERROR if self.world.is_main or where else logging.INFO
        log.log(level, "%s: the process ends; all stacks are in %s", evidence, self.directory.log(self.world.rank))
        log.info("%s", hang.stacks, extra=IN_FILE_ONLY)
        if self.world.size > 1 and not hang.stop_asked:
            evidence = self._among_others(notes.Hung(self.world.rank, evidence, where is not None))
        for_another = hang.stop_asked and self._was_asked_for_another()
        if (why := endings.failure(self.directory.path) if for_another else None) is not None:
            log.error("error: %s", why)
        is_left = hang.stop_asked and self._leaves_newest()
        code = 75 if is_left and not for_another else 1  # the same command goes on, from what was written
        if self.run is not None:
            if not hang.stop_asked:
                self.run.guard.hung(evidence, in_update=hang.phase is Phase.STEP)
            else:
                self.run.guard.ended(was_killed=for_another and why is None)
            if self.world.is_main:
                status = "preempted" if code == 75 else "failed"
                _write(_summary(status, code, time.monotonic() - self.started, self.run), self.directory)
        return code

    def _leaves_newest(self) -> bool:
        """Leave the newest proven state, while the loop is not waited for; False where updates are lost for want of it.

        Rank 0 does it; the others cannot know, and let it begin before it loses them.
        """
        if not self.world.is_main:
            time.sleep(_FOR_OTHERS_S)
        if self.run is None or not self.world.is_main or not self.run.guard.clock.step:
            return True
        step, path = self.run.guard.leave_newest()
        if path is None:
            log.error("no newer state could be written: the run begins again at step %s", f"{step:,}")
        else:
            log.info("the state of step %s is in %s: the same command goes on from there", f"{step:,}", path)
        return path is not None

    def _among_others(self, mine: notes.Hung) -> str:
        """Have rank 0 say who hung where: the others give it the time, because their end would be all that it sees."""
        place, size = self.directory.path, self.world.size
        if not self.world.is_main:
            with suppress(OSError):  # of another host
                notes.leave(place, mine)
            time.sleep(_FOR_OTHERS_S)
            return mine.evidence
        evidence = notes.who_hung(notes.gather_hung(place, mine, size, _FOR_OTHERS_S), size)
        if evidence != mine.evidence:
            log.error("%s", evidence)
        return evidence


def _elsewhere(hang: Hang) -> str:
    """Where it stands if not in the user's code; what that code waits for in a worker of a data loader is there."""
    for frame in hang.frames:
        workers = getattr(frame.f_locals.get("self"), "_workers", [])
        if workers and frame.f_code.co_filename.endswith(_LOADER):
            pids = ", ".join(str(one.pid) for one in workers)
            return f"no line of yours: it waits for a batch from the workers of the data loader (processes {pids})"
    return "no line of yours"


def _write(summary: Summary, directory: RunDirectory) -> None:
    """Commit the summary; a disk that does not take it is no reason to fail."""
    try:
        summary.write(directory.summary)
    except OSError as error:
        log.error("%s cannot be written: %s", directory.summary, error.strerror or error)


def _finish(tracker: Tracker, status: str, requests: StopRequests) -> TrackedRun | None:
    """Deliver the rest to MLflow and say where to look."""
    requests.may_interrupt = True
    try:
        tracked = tracker.finish(status)
    finally:
        requests.may_interrupt = False
    if tracked is not None:
        for line in where_to_look(tracking.ui_command(tracked.tracking_uri), tracked.url):
            log.info("%s", line)
    return tracked


def _greet(directory: RunDirectory, world: World) -> None:
    log.info("resilient_train %s in %s", __version__, directory.path)
    log.info("%s", world)


def _already_complete(composed: Composed, directory: RunDirectory, summary: dict[str, Any], world: World) -> Ending:
    changes = composed.changes(directory.config)
    validate(composed.config, changes, _HOME.absolute())  # a mistake is one, also where there is nothing to do
    if summary["status"] == "gave_up" and not world.is_main:
        return Ending(int(summary["exit_code"]), None)
    if summary["status"] == "gave_up":
        good = last_good_of(directory.path)
        where = f"its last good state is in {good.path}" if good is not None else "it left no good state"
        log.error("%s gave up: the end of its train.log says why; %s", directory.path, where)
        log.error("with another configuration it goes on from there; with run.resume=never it starts anew")
        return Ending(int(summary["exit_code"]), None)
    log.info("%s is complete: %s steps, loss %s", directory.path, summary["steps"], _rounded(summary.get("final_loss")))
    for line in told_changes(changes):
        log.info("other than asked for now: %s", line)
    log.info("nothing is left to train; run.resume=never trains another one beside it")
    if world.is_main and (left := left_in(directory.path)):
        entries = "1 entry" if left == 1 else f"{left:,} entries"
        log.warning("MLflow lacks %s of it; to deliver them:\n  %s", entries, command("sync", directory.path))
    evaluated = summary.get("eval")
    return Ending(0, evaluated.get("loss") if isinstance(evaluated, dict) else summary.get("final_loss"))


def _say(error: BaseException | None, directory: RunDirectory, world: World, run: Run | None, seconds: float) -> None:
    """Say how it ended: one line for the terminal; a traceback goes to the log file."""
    if isinstance(error, GaveUp):  # the guard has told it
        return
    if error is None:
        assert run is not None
        loss = _rounded(run.guard.recent_loss)
        evaluated = "".join(f", evaluation {name} {value:.4g}" for name, value in (run.evaluated or {}).items())
        told = f"completed {run.guard.clock.step} steps in {duration(seconds)}: recent loss {loss}{evaluated}"
        log.info("%s", told, extra=GOOD)
    elif isinstance(error, Stopped):
        log.info("%s; the same command goes on", error, extra=ODD)
    elif isinstance(error, TrainError):
        # Every rank finds the same fault in a configuration, and in what they tell each other; rank 0 says it for all.
        is_everybodys = isinstance(error, ConfigError | RanksDiffer | PeerEnded)
        level = logging.ERROR if world.is_main or not is_everybodys else logging.INFO
        log.log(level, "error: %s", error, exc_info=error.__cause__)
    elif isinstance(error, KeyboardInterrupt):
        log.error("interrupted: the same command goes on from the newest checkpoint")
    else:
        where = f" on rank {world.rank}" if world.size > 1 else ""
        file = directory.log(world.rank)
        log.error("error%s: %s; the traceback is in %s", where, in_one_line(error), file, exc_info=error)


def _rounded(loss: Any) -> str:
    return f"{loss:.4g}" if isinstance(loss, float) else "unknown"


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    return error.exit_code if isinstance(error, TrainError | Stopped) else 1


def _summary(status: str, exit_code: int, seconds: float, run: Run | None) -> Summary:
    if run is None:
        return Summary.without_update(status, exit_code, seconds)
    state = run.guard.state
    digests = (state.weights_sha256(), state.sha256()) if status == "completed" else None
    summary = run.guard.chronicle.summary(status, exit_code, seconds, digests)
    summary.eval = run.evaluated  # by an earlier process, perhaps
    return summary
