"""One run from its directory to its summary: what surrounds the loop."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient_train import __version__
from resilient_train.assemble import Run, assemble
from resilient_train.checkpoint import weights
from resilient_train.checkpoint.last_good import CHECKPOINTS
from resilient_train.config.compose import Composed, flattened
from resilient_train.errors import ConfigError, GaveUp, TrainError, in_one_line
from resilient_train.files import commit_text
from resilient_train.ranks.interrupt import Interrupt
from resilient_train.ranks.lock import DirectoryLock
from resilient_train.ranks.world import World, is_lost_peer
from resilient_train.record import tracking
from resilient_train.record.console import Terminal, duration, log
from resilient_train.record.directory import RunDirectory, claim
from resilient_train.record.incidents import INCIDENTS, IncidentBook, tags, to_mend
from resilient_train.record.summary import Summary
from resilient_train.record.tracking import NullTracker, TrackedRun, Tracker
from resilient_train.state.determinism import set_deterministic
from resilient_train.train import train


@dataclass(frozen=True)
class Ending:
    """How a run ended, for whoever started it."""

    exit_code: int
    loss: float | None  # of the evaluation if there was one, else of the training


def run(composed: Composed) -> Ending:
    """Train as configured, in a directory of its own. An error becomes one line, a summary and an exit code."""
    config = composed.config
    world = World.joined(config.accelerate)
    terminal = Terminal(is_main=world.is_main)
    held: list[DirectoryLock] = []
    try:
        directory = world.on_main(lambda: _open(composed, held))
        if directory.finished is not None:
            ending = _already_complete(directory, directory.finished)
        else:
            terminal.log_to(directory.log(world.rank))
            set_deterministic(config.run.deterministic)
            ending = _run(composed, world, terminal, directory)
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
        Path(settings.dir),
        steps=settings.steps,
        resume=settings.resume,
        is_same=composed.is_same_as,
        is_unchanged=composed.is_unchanged,
    )
    held.append(lock)
    if directory.finished is None:
        commit_text(directory.config, composed.yaml(directory.path))
    elif changes := composed.differences(directory.config):
        lock.release()
        why = f"holds a finished run of another configuration ({'; '.join(changes)}): choose another run.name"
        raise ConfigError("run.dir", directory.path, why)
    return directory


def _run(composed: Composed, world: World, terminal: Terminal, directory: RunDirectory) -> Ending:
    config, started = composed.config, time.monotonic()
    tracker: Tracker = NullTracker()
    assembled: Run | None = None
    book = IncidentBook(None)
    status, error = "failed", None
    try:
        if world.is_main:
            tracker = tracking.build(config.tracking, directory.path.name, Path("runs").absolute())
        _greet(directory, world)
        if world.is_main:
            book = IncidentBook(directory.path)
        assembled = assemble(config, world, book)
        log.info("%s", assembled)
        tracker.params(flattened(composed.resolved))
        tracker.artifact(directory.config)
        display = terminal.display(steps=config.run.steps, done=assembled.guard.clock.step)
        try:
            with Interrupt() as interrupt:
                train(assembled, display, tracker, interrupt)
        finally:
            display.close()
            assembled.close()
        if world.is_main:
            weights.save(assembled.bare_model, directory.path / weights.WEIGHTS)
        status = "completed"
    except BaseException as caught:  # a SystemExit in a user's code, too: it is not the end that was asked for
        error = caught
        status = "gave_up" if isinstance(caught, GaveUp) else "failed"
    book.close()
    seconds = time.monotonic() - started
    summary = _summary(status, _exit_code(error), seconds, assembled)
    _say(error, directory, world, assembled, seconds)
    if world.is_main:
        summary.write(directory.summary)  # before MLflow may take its time
        if summary.ticks:  # a mistake in a configuration is nothing to track
            if assembled is not None:
                tracker.tags(tags(assembled.guard.incidents))
            for file in (directory.log(0), directory.path / INCIDENTS):
                if file.exists():
                    tracker.artifact(file)
            tracked = _finish(tracker, status)
            summary.mlflow = tracked.as_dict() if tracked else None
            summary.write(directory.summary)
    if isinstance(error, KeyboardInterrupt):
        raise error
    evaluated = assembled.evaluated if assembled else None
    loss = evaluated["loss"] if evaluated else summary.final_loss
    return Ending(summary.exit_code, None if error else loss)


def _finish(tracker: Tracker, status: str) -> TrackedRun | None:
    """Deliver the rest to MLflow and say where to look."""
    try:
        tracked = tracker.finish(status)
    except KeyboardInterrupt:
        log.warning("interrupted while MLflow was being told the rest")
        return tracker.run
    if tracked is not None:
        if tracked.tracking_uri.startswith("sqlite:"):
            log.info("to see it, start\n  %s", tracking.ui_command(tracked.tracking_uri))
        if tracked.url:
            log.info("and open\n  %s", tracked.url)
    return tracked


def _greet(directory: RunDirectory, world: World) -> None:
    if directory.note:
        log.info("%s", directory.note)
    log.info("resilient_train %s in %s", __version__, directory.path)
    log.info("%s", world)


def _already_complete(directory: RunDirectory, summary: dict[str, Any]) -> Ending:
    if summary["status"] == "gave_up":
        kept = sorted((directory.path / CHECKPOINTS).glob("step-*"))
        where = f"its last good state is in {kept[-1]}" if kept else "it left no state"
        log.error("%s gave up: the end of its train.log says why; %s", directory.path, where)
        log.error("with another configuration it starts anew, and so it does with run.resume=never")
        return Ending(int(summary["exit_code"]), None)
    log.info("%s is complete: %s steps, loss %s", directory.path, summary["steps"], _rounded(summary.get("final_loss")))
    log.info("run.resume=never trains another one beside it")
    evaluated = summary.get("eval")
    return Ending(0, evaluated.get("loss") if isinstance(evaluated, dict) else summary.get("final_loss"))


def _say(error: BaseException | None, directory: RunDirectory, world: World, run: Run | None, seconds: float) -> None:
    """Say how it ended: one line for the terminal; a traceback goes to the log file."""
    if error is None:
        assert run is not None
        loss = _rounded(run.tally.final_loss)
        evaluated = "".join(f", evaluation {name} {value:.4g}" for name, value in (run.evaluated or {}).items())
        log.info("completed %d steps in %s: recent loss %s%s", run.guard.clock.step, duration(seconds), loss, evaluated)
        counted = run.guard.tally()
        if total := counted["total"]:
            causes = ", ".join(f"{number} {cause}" for cause, number in counted["by_cause"].items())
            lost = run.guard.clock.tick - run.guard.clock.step
            met = f"{total} incident{'s' * (total > 1)} ({causes})"
            log.info("met %s: %d of %d updates were lost; see incidents.jsonl", met, lost, run.guard.clock.tick)
            for line in to_mend(run.guard.incidents):
                log.info("%s", line)
        log.info("weights and summary in %s", directory.path)
    elif isinstance(error, GaveUp):
        log.info(
            "the same command says so again; with run.resume=never it starts anew"
        )  # the rest was said by the guard
    elif isinstance(error, TrainError):
        # Every rank finds the same fault in a configuration; rank 0 says it for all.
        level = logging.ERROR if world.is_main or not isinstance(error, ConfigError) else logging.INFO
        log.log(level, "error: %s", error, exc_info=error.__cause__)
    elif isinstance(error, KeyboardInterrupt):
        log.error("interrupted: the run cannot be continued yet, the same command starts it anew")
    elif world.size > 1 and is_lost_peer(error):
        log.error(
            "error: another process of this run ended; its own line is above, or in its train.rank*.log", exc_info=error
        )
    else:
        where = f" on rank {world.rank}" if world.size > 1 else ""
        file = directory.log(world.rank)
        log.error("error%s: %s; the traceback is in %s", where, in_one_line(error), file, exc_info=error)


def _rounded(loss: Any) -> str:
    return f"{loss:.4g}" if isinstance(loss, float) else "unknown"


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    return error.exit_code if isinstance(error, TrainError) else 1


def _summary(status: str, exit_code: int, seconds: float, run: Run | None) -> Summary:
    clock = run.guard.clock if run else None
    return Summary(
        status=status,
        exit_code=exit_code,
        steps=clock.step if clock else 0,
        ticks=clock.tick if clock else 0,
        steps_lost=clock.tick - clock.step if clock else 0,
        final_loss=run.tally.final_loss if run else None,
        eval=run.evaluated if run else None,
        incidents=run.guard.tally() if run else {"total": 0, "recovered": 0, "by_cause": {}},
        seconds=round(seconds, 3),
        step_ms=run.tally.step_ms if run else None,
        weights_sha256=run.guard.state.weights_sha256() if run and status == "completed" else None,
        state_sha256=run.guard.state.sha256() if run and status == "completed" else None,
        mlflow=None,
    )
