"""One run from its directory to its summary: what surrounds the loop."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient_train import __version__
from resilient_train.assemble import Run, assemble
from resilient_train.checkpoint import weights
from resilient_train.config.compose import Composed, flattened
from resilient_train.config.targets import told
from resilient_train.errors import ConfigError, TrainError
from resilient_train.files import commit_text
from resilient_train.ranks.lock import DirectoryLock
from resilient_train.ranks.world import World
from resilient_train.record import tracking
from resilient_train.record.console import Terminal, duration, log
from resilient_train.record.directory import RunDirectory, claim
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
    world = World(config.accelerate)
    terminal = Terminal(is_main=world.is_main)
    held: list[DirectoryLock] = []
    try:
        directory = world.on_main(lambda: _open(composed, held))
        if directory.finished is not None:
            return _already_complete(directory, directory.finished)
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
    directory, lock = claim(Path(settings.dir), steps=settings.steps, resume=settings.resume)
    held.append(lock)
    if directory.finished is None:
        commit_text(directory.config, composed.yaml)
    elif changes := composed.differences(directory.config):
        lock.release()
        why = f"holds a finished run of another configuration ({'; '.join(changes)}): choose another run.name"
        raise ConfigError("run.dir", directory.path, why)
    return directory


def _run(composed: Composed, world: World, terminal: Terminal, directory: RunDirectory) -> Ending:
    config, started = composed.config, time.monotonic()
    tracker: Tracker = NullTracker()
    assembled: Run | None = None
    status, error = "failed", None
    try:
        if world.is_main:
            tracker = tracking.build(config.tracking, directory.path.name, Path("runs").absolute())
        _greet(directory, world)
        assembled = assemble(config, world)
        log.info("%s", assembled)
        tracker.params(flattened(composed.resolved))
        tracker.artifact(directory.config)
        display = terminal.display(steps=config.run.steps, done=assembled.clock.step)
        try:
            train(assembled, display, tracker)
        finally:
            display.close()
            assembled.samples.close()
        if world.is_main:
            weights.save(assembled.bare_model, directory.path / weights.WEIGHTS)
        status = "completed"
    except BaseException as caught:
        error = caught
    tracker.artifact(directory.log(0))
    tracked = tracker.finish(status)
    exit_code = _exit_code(error)
    seconds = time.monotonic() - started
    if world.is_main:
        _summary(status, exit_code, seconds, assembled, tracked).write(directory.summary)
    if error is not None:
        _tell(error, directory, world)
        if not isinstance(error, Exception | KeyboardInterrupt):
            raise error
        return Ending(exit_code, None)
    assert assembled is not None
    _farewell(directory, assembled, seconds, tracked)
    evaluated = assembled.evaluated
    return Ending(exit_code, evaluated["loss"] if evaluated else assembled.tally.final_loss)


def _greet(directory: RunDirectory, world: World) -> None:
    if directory.note:
        log.info("%s", directory.note)
    log.info("resilient_train %s in %s", __version__, directory.path)
    log.info("%s", world)


def _already_complete(directory: RunDirectory, summary: dict[str, Any]) -> Ending:
    log.info("%s is complete: %s steps, final loss %s", directory.path, summary["steps"], summary.get("final_loss"))
    log.info("run.resume=never trains another one beside it")
    evaluated = summary.get("eval")
    return Ending(0, evaluated.get("loss") if isinstance(evaluated, dict) else summary.get("final_loss"))


def _farewell(directory: RunDirectory, run: Run, seconds: float, tracked: TrackedRun | None) -> None:
    loss = run.tally.final_loss
    evaluated = "".join(f", evaluation {name} {value:.4g}" for name, value in (run.evaluated or {}).items())
    log.info("completed %d steps in %s: loss %.4g%s", run.clock.step, duration(seconds), loss, evaluated)
    log.info("weights and summary in %s", directory.path)
    if tracked is not None:
        if tracked.tracking_uri.startswith("sqlite:"):
            log.info("to see it, start\n  %s", tracking.ui_command(tracked.tracking_uri))
        if tracked.url:
            log.info("and open\n  %s", tracked.url)


def _tell(error: BaseException, directory: RunDirectory, world: World) -> None:
    """One line for the terminal; the traceback goes to the log file."""
    if isinstance(error, TrainError):
        log.error("error: %s", error, exc_info=error.__cause__)
    elif isinstance(error, KeyboardInterrupt):
        log.error("interrupted: the run cannot be continued yet, the same command starts it anew")
    else:
        log.error("error: %s; the traceback is in %s", told(error), directory.log(world.rank), exc_info=error)


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    return error.exit_code if isinstance(error, TrainError) else 1


def _summary(status: str, exit_code: int, seconds: float, run: Run | None, tracked: TrackedRun | None) -> Summary:
    clock = run.clock if run else None
    return Summary(
        status=status,
        exit_code=exit_code,
        steps=clock.step if clock else 0,
        ticks=clock.tick if clock else 0,
        steps_lost=clock.tick - clock.step if clock else 0,
        final_loss=run.tally.final_loss if run else None,
        eval=run.evaluated if run else None,
        incidents={"total": 0, "recovered": 0, "by_cause": {}},
        seconds=round(seconds, 3),
        step_ms=run.tally.step_ms if run else None,
        weights_sha256=run.state.weights_sha256() if run and status == "completed" else None,
        state_sha256=run.state.sha256() if run and status == "completed" else None,
        mlflow=tracked.as_dict() if tracked else None,
    )
