"""One run, from its directory to its summary: everything around the loop."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilient_train import __version__
from resilient_train.command.build import Run, assemble, train
from resilient_train.command.config.compose import FIXED, Composed, other_run
from resilient_train.command.terminal import Terminal
from resilient_train.data.trees import state_sha256, weights_sha256
from resilient_train.durable import endings
from resilient_train.durable import store as weights
from resilient_train.durable.endings import CONFIG, SUMMARY, RunFacts, Summary, read_ending, status_of
from resilient_train.durable.incident_log import IncidentLog
from resilient_train.durable.lock import LOCK, DirectoryLock
from resilient_train.durable.manifest import WEIGHTS
from resilient_train.durable.resume import Resume
from resilient_train.durable.run_history import history_of
from resilient_train.ground.errors import (
    ConfigError,
    DirectoryInUse,
    GaveUp,
    PeerEnded,
    RanksDiffer,
    Stopped,
    TrainError,
    short_message,
)
from resilient_train.ground.files import commit_text, is_left_over, siblings, sweep, sync_directory
from resilient_train.ground.secrets import masked
from resilient_train.ground.types import fact
from resilient_train.ground.wording import IN_FILE_ONLY, counted, log, say
from resilient_train.loop.reporter import Place, conclude, note_error, print_review, write_end
from resilient_train.parts.code_lines import called_by_us, is_users
from resilient_train.processes.process_exit import StopRequests
from resilient_train.processes.watchdog import Hang, Phase, Watchdog
from resilient_train.processes.world import World, is_lost_peer
from resilient_train.report import tracker as tracking
from resilient_train.report.story import again
from resilient_train.report.tracker import Tracker

_HOME = Path("runs")  # of MLflow's database, if no other store is configured
_BEHIND_WATCHDOG_S = 60.0  # the watchdog reports a hang better than a collective that fails
_FOR_OTHERS_S = 1.2  # seconds in which the watchdogs of other ranks look at their clocks, too


def run(composed: Composed) -> int:
    """Train as configured, in a run directory; return the exit code. An error becomes one line and a summary."""
    config = composed.config
    limits = (config.run.start_timeout, config.run.step_timeout, config.run.save_timeout)
    limit = max(limits) + _BEHIND_WATCHDOG_S if all(limits) else 0.0
    world = World.joined(config.accelerate, start_timeout=config.run.start_timeout, limit=limit)
    terminal = Terminal(is_main=world.is_main)
    locks: list[DirectoryLock] = []
    try:
        directory = world.on_main(lambda: claim(composed, locks))
        if directory.finished is not None:
            code = _already_finished(directory, directory.finished, world)
        else:
            terminal.log_to(directory.log(world.rank))
            _set_deterministic(config.run.deterministic)
            session, error = _Session(composed, world, directory), None
            with StopRequests(config.run.max_hours, is_in_loop=False) as requests:
                try:
                    session.train(requests)
                except BaseException as caught:  # a SystemExit of user code does not end the run either
                    error = caught
                requests.is_in_loop = True  # the rest is short, and is finished in any case
                code = session.end(error, requests)
        if code == 0:
            world.leave()
        return code
    finally:
        terminal.close()
        for lock in locks:
            lock.release()


@dataclass(frozen=True)
class RunDirectory:
    path: Path
    resumes: bool = False  # a run that began there
    finished: dict[str, Any] | None = None  # the summary of a run that is complete already, or gave up
    changes: dict[str, str] = field(default_factory=dict)  # of the configuration since that run began, by key

    def log(self, rank: int) -> Path:
        return self.path / ("train.log" if rank == 0 else f"train.rank{rank}.log")


def claim(composed: Composed, locks: list[DirectoryLock]) -> RunDirectory:
    """Lock the directory of a run, or the next sibling that is free if nothing is to be resumed; `locks` gets the lock.

    A directory without any update is reused. The restart of a launch takes the directory of its first start.
    """
    path = Path(composed.config.run.dir).absolute()
    resumes = composed.config.run.resume != "never"
    for candidate in siblings(path):
        try:
            is_new, lock = _locked(candidate)
        except DirectoryInUse:
            if resumes:
                raise
            continue
        summary = read_ending(candidate, SUMMARY) or {}
        is_free = is_new or (summary.get("ticks") == 0 and not (candidate / endings.CHECKPOINTS).exists())
        if resumes or is_free or _was_launched_by_this(candidate):
            locks.append(lock)
            return _opened(composed, candidate, None if is_free else summary)
        lock.release()
    raise AssertionError("there is always another name")


def _opened(composed: Composed, path: Path, summary: dict[str, Any] | None) -> RunDirectory:
    """Open a directory that is locked, with the summary of the run there; None if there is none.

    One that holds the complete run is returned with its summary, and so is one that gave up with the same
    configuration: it would give up again. Any other run resumes.
    """
    settings, found = composed.config.run, RunDirectory(path)
    if summary is not None:
        changes, status = composed.changes(path / CONFIG), summary.get("status")
        done, resume = summary.get("steps"), settings.resume
        is_complete = isinstance(done, int) and done >= settings.steps and status == "completed"
        is_finished = is_complete or (status == "gave_up" and not changes)
        if is_finished and (resume == "auto" or (resume != "never" and masked(resume) in history_of(path).sources)):
            if others := other_run(changes):
                raise _refused(path, f"holds a finished run of another configuration ({'; '.join(others)})")
            endings.begin(path, is_finished=True)
            return RunDirectory(path, finished=summary, changes=changes)
        found = RunDirectory(path, resumes=True, changes=changes)
    if (launch := _launch()) is not None:  # so that its restarts are recognized, and can be waited for
        commit_text(path / endings.LAUNCH, launch + "\n")
    if not found.resumes:
        commit_text(path / CONFIG, composed.yaml(path))
        endings.begin(path, is_finished=False)
    elif fixed := [f"{key}: {how}" for key, how in found.changes.items() if key.startswith(FIXED)]:
        raise _refused(path, f"holds a run that cannot resume with another {'; '.join(fixed)}")
    return found


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError("run.dir", path, f"{why}: choose another run.name")


def _locked(path: Path) -> tuple[bool, DirectoryLock]:
    """Lock a directory, which is made if needed; return whether it had no run, and the lock."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # so that a power cut does not lose the directory itself
            sync_directory(path.parent)
        is_new = not (path / CONFIG).exists()
        names = sorted(one.name for one in path.iterdir()) if is_new else []
        if unexpected := [name for name in names if name != LOCK and not is_left_over(name)]:
            why = f"holds files that are not a run ({', '.join(unexpected[:3])}): choose another directory"
            raise ConfigError("run.dir", path, why)
        lock = DirectoryLock(path)
        sweep(path.resolve())
        return is_new, lock
    except OSError as error:
        raise ConfigError("run.dir", path, f"cannot be written: {error.strerror or error}") from error


def _launch() -> str | None:
    """Name what all restarts of one launch share; None if nothing restarts this process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return f"agent {os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()}"
    return f"slurm {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else None


def _was_launched_by_this(run_dir: Path) -> bool:
    """Say whether this process is a restart by the launcher that started the run there."""
    restarts = [os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")]
    if restarts == ["0", "0"]:
        return False
    try:
        return (run_dir / endings.LAUNCH).read_text(errors="replace").strip() == _launch()
    except OSError:
        return False


@dataclass(eq=False)
class _Session:
    """A run from its start to its end: `end` reports what `train` has built until then."""

    composed: Composed
    world: World
    directory: RunDirectory
    tracker: Tracker = field(default_factory=Tracker)
    incident_log: IncidentLog = field(default_factory=lambda: IncidentLog(None))
    run: Run | None = None  # once it is resumed

    def train(self, requests: StopRequests) -> None:
        composed, world, directory = self.composed, self.world, self.directory
        config, settings = composed.config, composed.config.run
        if world.is_main:
            self.tracker = tracking.build(config.tracking, directory.path, _HOME.absolute(), composed.params)
        log.info("resilient_train %s in %s", __version__, directory.path)
        log.info("%s", world)
        self.incident_log = IncidentLog(directory.path, writes=world.is_main)
        source = None if settings.resume in ("auto", "never") else Path(settings.resume)
        resume = Resume(source, tuple(directory.changes))
        watchdog = Watchdog(  # from before the first line of user code
            {Phase.START: settings.start_timeout, Phase.STEP: settings.step_timeout, Phase.SAVE: settings.save_timeout},
            lambda: self.run.guard.saving_since if self.run else None,
            self._end_hung,
        )
        with watchdog:
            home = Place(self.incident_log, tracker=self.tracker)
            run = assemble(config, world, home, resume, requests.asked, watchdog.beat)
            log.info("%s", run)
            self._resume(run)
            requests.is_in_loop = True
            try:
                train(run)
                watchdog.beat(Phase.SAVE)
                left = run.guard.leave()
            finally:
                run.close()
            if run.guard.stopped:
                stopped = f"stopped at step {run.guard.clock.step:,}, asked by {requests.by or 'another'}"
                if left is None:
                    raise TrainError(f"{stopped}: no state could be written")
                raise Stopped(f"{stopped}: the state is in {left}")
            tensors = weights.gathered(run.bare_model, keep=world.is_main)
            if world.is_main:
                weights.save(tensors, directory.path / WEIGHTS)

    def _resume(self, run: Run) -> None:
        """Resume the run of the directory. A changed configuration is written only now."""
        directory, is_main = self.directory, self.world.is_main
        for key, how in directory.changes.items():
            log.info("changed: %s: %s", key, how)
        resumed = run.guard.resume()
        self.run = run  # before the files of the previous process are replaced, as that may fail
        if resumed:
            log.info("resumes from step %d", run.guard.clock.step)
        elif directory.resumes and is_main and not self.incident_log.has_saved:
            log.info("the run there had no checkpoint yet: it begins at step 0 again")
        if directory.resumes and is_main:
            endings.begin(directory.path, is_finished=False)
            if directory.changes:
                commit_text(directory.path / CONFIG, self.composed.yaml(directory.path))

    def _end_hung(self, hang: Hang) -> None:
        """Log where the run hangs, and save what can be saved. The watchdog's thread calls it."""
        world, directory = self.world, self.directory
        place, is_theirs = _place_of(hang)
        evidence = fact("hangs", phase=str(hang.phase), seconds=hang.seconds, where=place)
        # Rank 0 reports for the ranks that only wait for another; a rank that hangs in user code reports itself.
        level = logging.ERROR if world.is_main or is_theirs else logging.INFO
        log.log(level, "%s: the process ends; all stacks are in %s", say(evidence), directory.log(world.rank))
        with open(directory.log(world.rank), "a", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)
        if is_theirs and not world.is_main:
            endings.note_failure(directory.path, world.rank, say(evidence), in_training=False)
        if world.size > 1:
            time.sleep(_FOR_OTHERS_S)  # rank 0 reads what others noted before it sees that they ended
        if world.is_main and not is_theirs and (noted := endings.failure(directory.path)):
            log.error("%s", noted)
            evidence = fact("text", text=noted)
        if self.run is not None:  # else the journal still is the previous process's
            self.run.guard.process.hung(evidence, in_update=hang.phase is Phase.STEP)
        if world.is_main:
            self._write(self._summary(TrainError(say(evidence, "; "))))

    def end(self, error: BaseException | None, requests: StopRequests) -> int:
        directory, run, is_main = self.directory, self.run, self.world.is_main
        why = self._failure_elsewhere(error)
        if why is not None:
            ended = PeerEnded(why or "another process of this run ended; its error is in its train.rank*.log")
            ended.__cause__, error = error, ended
        elif not is_main and error is not None:
            note_error(directory.path, self.world.rank, error, in_training=run is not None)
        if run is not None and why != "":  # else the journal still is the previous process's
            run.guard.process.ends()
        summary = self._summary(error)
        if summary.weights_sha256 is not None:  # each rank logs its own
            log.info("weights_sha256 %s", summary.weights_sha256, extra=IN_FILE_ONLY)
        if error is not None:
            _print_error(error, directory, self.world)
        if is_main:
            self._write(summary)
            if run is not None:
                requests.may_interrupt = True
                conclude(summary, self.incident_log, directory.path, self.tracker)
        self.incident_log.close_sinks()
        self.incident_log.close_files()
        if isinstance(error, KeyboardInterrupt):
            raise error
        return summary.exit_code

    def _summary(self, error: BaseException | None) -> Summary:
        if self.run is None:
            return Summary(**status_of(RunFacts(error=error)).written())
        state = self.run.guard.state
        digests = (weights_sha256(state), state_sha256(state)) if error is None else None
        return self.run.guard.reporter.summary(RunFacts(error=error, is_closed=True), digests)

    def _write(self, summary: Summary) -> None:
        """Write how the run ended. If it has not even resumed, the summary of the previous process stays."""
        if self.run is not None or not self.directory.resumes:
            write_end(summary, self.incident_log, self.directory.path)
        elif summary.exit_code != 2 or "WORLD_SIZE" in os.environ:  # a launcher hides that it was refused
            endings.note_refusal(self.directory.path, summary.exit_code, summary.why or "")

    def _failure_elsewhere(self, error: BaseException | None) -> str | None:
        """Return why another rank failed, which ends this one, or "" if it did not say; None if none has."""
        failure = endings.failure(self.directory.path)
        if isinstance(error, Stopped):  # by a launcher since another failed, or by a person or a scheduler
            has_agreed = self.run is not None and self.run.guard.stopped
            has_failed = not has_agreed and failure != ""
        else:
            has_failed = error is not None and is_lost_peer(error)
        return failure if has_failed and self.world.size > 1 else None


def _place_of(hang: Hang) -> tuple[str, bool]:
    """Return the line where the main thread hangs, and whether it is in the user's code."""
    for frame in reversed(called_by_us(hang.frames)):
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}", True
    return "no line of yours: it waits for a library, or for a worker of the data loader", False


def _already_finished(directory: RunDirectory, summary: dict[str, Any], world: World) -> int:
    done = "gave up" if summary["status"] == "gave_up" else f"is complete: {counted(summary['steps'], 'step')}"
    log.info("%s %s", directory.path, done)
    for key, how in directory.changes.items():
        log.info("differs from this command: %s: %s", key, how)
    if world.is_main:
        print_review(directory.path)
    return int(summary["exit_code"])


def _print_error(error: BaseException, directory: RunDirectory, world: World) -> None:
    """Print one line on the terminal; a traceback goes to the log file."""
    if isinstance(error, GaveUp):  # the guard has printed it
        return
    if isinstance(error, Stopped):
        log.info("%s; %s", error, again(directory.path))
        return
    # Every rank finds the same mistake in a configuration, and the same differences; rank 0 reports for all.
    is_of_all = isinstance(error, ConfigError | RanksDiffer | PeerEnded)
    level = logging.ERROR if world.is_main or not is_of_all else logging.INFO
    where = f" on rank {world.rank}" if world.size > 1 and not is_of_all else ""
    traceback_of = error.__cause__ if isinstance(error, TrainError) else error
    log.log(level, "error%s: %s", where, short_message(error), exc_info=traceback_of)


def _set_deterministic(enabled: bool) -> None:
    """Make torch use deterministic operations; it warns of each operation that has no deterministic form."""
    import torch

    if torch.are_deterministic_algorithms_enabled() != enabled:  # the call imports torch's compiler: a second
        torch.use_deterministic_algorithms(enabled, warn_only=True)
    torch.backends.cudnn.deterministic = enabled
    if enabled:
        torch.backends.cudnn.benchmark = False
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, at the first matrix product
