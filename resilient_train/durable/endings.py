"""How a run ended: loop.json, summary.json, refused.json, failed.rank*.

All but loop.json are about the newest process. A process that begins removes those of the previous one, so a run
without them and without a live process was killed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from resilient_train.durable.journal import commit_json
from resilient_train.durable.lock import holder_of
from resilient_train.ground import files
from resilient_train.ground.errors import GaveUp, Stopped, TrainError, short_message
from resilient_train.ground.files import read_json, read_yaml
from resilient_train.ground.types import Incident, Outcome

CONFIG, LOOP = "config.yaml", "loop.json"  # of a run of the command, and of a loop that the caller wrote
SUMMARY, REFUSED = "summary.json", "refused.json"
_FAILED = "failed.rank{}"
CHECKPOINTS = "checkpoints"
DEMOTED_END = ".demoted"  # of the name of a checkpoint: an incident began before it
LAUNCH = ".launch"  # names what may restart the newest process of a run


def settings_of(run_dir: Path) -> Mapping[str, Any]:
    """Read the node `run` of a configuration, or what a loop has planned; nothing if that is damaged."""
    match read_yaml(run_dir / CONFIG), read_json(run_dir / LOOP):
        case ({"run": dict(settings)}, _) | (_, dict(settings)):
            return settings
    return {}


def is_run(run_dir: Path) -> bool:
    return (run_dir / CONFIG).is_file() or (run_dir / LOOP).is_file()


@dataclass
class Summary:
    """summary.json, whose fields scripts rely on. Units are in the names."""

    status: str  # completed, gave_up, preempted, failed; of a loop that the caller wrote also closed, ended (left)
    exit_code: int
    steps: int = 0
    ticks: int = 0
    steps_lost: int = 0
    final_loss: float | None = None
    eval: dict[str, float] | None = None
    incidents: dict[str, Any] = field(default_factory=lambda: {"total": 0, "recovered": 0, "by_cause": {}})
    seconds: float = 0.0
    step_ms: float | None = None
    weights_sha256: str | None = None
    state_sha256: str | None = None
    mlflow: dict[str, Any] | None = None
    first_loss: float | None = None  # the level of the first 8, to compare the final one with
    # the steps in which the loss was far lower than at the end, and their level; null if it was not
    best_level: dict[str, Any] | None = None
    # well, unjudged, recovered, observed, unrecovered, no_progress, above_best; the status if the run did not complete
    verdict: str | None = None
    trial_updates: int = 0  # made to try remedies: neither steps nor ticks
    why: str | None = None  # it did not complete, in one line


def begin(run_dir: Path, *, is_finished: bool) -> None:
    """Remove what earlier processes wrote about their end. A finished run keeps its summary: nothing begins there."""
    old = [run_dir / REFUSED, *run_dir.glob(_FAILED.format("*"))] + [run_dir / SUMMARY] * (not is_finished)
    for path in old:
        with suppress(OSError):  # of several ranks that share a directory one does it
            files.disk.unlink(path)


def note_refusal(run_dir: Path, exit_code: int, why: str) -> None:
    """Note in the directory of a run that a start was refused: a launcher hides the exit code."""
    if (run_dir / CONFIG).is_file():
        with suppress(OSError):
            commit_json(run_dir / REFUSED, {"exit_code": exit_code, "why": why})


def note_failure(run_dir: Path, rank: int, why: str, *, in_training: bool) -> None:
    """Note the error of a rank other than 0, which sees only a closed connection, or where that rank hangs.

    One `in_training` explains why the process ended; without it, that counts as a kill by its samples.
    """
    if is_run(run_dir):
        with suppress(OSError):
            commit_json(run_dir / _FAILED.format(rank), {"rank": rank, "why": why, "in_training": in_training})


def failure(run_dir: Path | None, *, in_training: bool = False) -> str:
    """Return the error of the first rank other than 0 that noted one, in one line; empty if none did."""
    notes = [read_json(path) for path in run_dir.glob(_FAILED.format("*"))] if run_dir is not None else []
    noted = [(one["rank"], one["why"]) for one in notes if one and (one["in_training"] or not in_training)]
    return "rank {}: {}".format(*min(noted)) if noted else ""


def read_ending(run_dir: Path, name: str) -> dict[str, Any] | None:
    """Read SUMMARY or REFUSED; None if it is not there or is damaged."""
    node = read_json(run_dir / name)
    return node if isinstance(node, dict) and type(node.get("exit_code")) is int else None


def at_work(run_dir: Path) -> str | None:
    """Name the process that holds the lock on a run directory."""
    if (run_dir / LOOP).is_file() and read_ending(run_dir, SUMMARY) is not None:
        return None  # the process of the caller's loop may be busy with something else
    return holder_of(run_dir)


_QUIET = 50  # updates without what came back, after which it is over


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What its own process knows at its end, or what others find in its directory."""

    incidents: Sequence[Incident] = ()
    step: int = 0  # accepted updates

    error: BaseException | None = None  # that ends the process
    is_closed: bool | None = None  # by the command or `guard.close`; False: the loop was left
    planned: int = 0  # updates
    is_stalled: bool = False  # its loss did not fall
    is_above_best: bool = False  # its loss ended far above its best level
    is_unjudged: bool = False  # a lower rate might have done better, and none could be tried

    summary: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""  # the error that a rank other than 0 noted
    refusal: Mapping[str, Any] = field(default_factory=dict)  # of the last start
    process: str | None = None  # that is at work
    is_run: bool = True


@dataclass(frozen=True)
class Status:
    state: str  # the status in summary.json; without one running, none, failed, killed
    status: str  # how the training fares
    exit_code: int
    why: str = ""  # it failed, gave up or stopped
    refused: str = ""  # why the last start was refused, whose exit code this is then
    process: str | None = None  # that is at work: it has not begun yet, or is about to end, if there is a summary
    summary: Mapping[str, Any] = field(default_factory=dict)

    def written(self) -> dict[str, Any]:
        """Return its fields of summary.json."""
        verdict = self.status if self.state == "completed" else self.state
        return {"status": self.state, "exit_code": self.exit_code, "verdict": verdict, "why": self.why or None}

    @property
    def in_mlflow(self) -> str:
        """MLflow's word. A run that is not back at its level has not succeeded."""
        return "FAILED" if self.status in ("gave_up", "unrecovered") else _IN_MLFLOW.get(self.state, "FAILED")


_VERDICTS = {"well", "unjudged", "recovered", "observed", "unrecovered", "no_progress", "above_best"}
_EXIT_CODES = {"completed": 0, "closed": 0, "running": 0, "none": 2}  # others: 1; an error has its own
_IN_MLFLOW = {"completed": "FINISHED", "closed": "FINISHED"} | dict.fromkeys(("ended", "preempted", "killed"), "KILLED")


def status_of(run: RunFacts) -> Status:
    """Say how a run stands or ended. What its own process has written goes before what others can tell."""
    state, error, summary = _state(run), run.error, run.summary
    exit_code = error.exit_code if isinstance(error, TrainError | Stopped) else _EXIT_CODES.get(state, 1)
    exit_code = summary.get("exit_code", exit_code)
    why = summary.get("why") or run.failure or (short_message(error) if error is not None else "")
    known = Status(state, _status(run, state), exit_code, str(why) if exit_code else "", summary=summary)
    if run.process is not None:
        return replace(known, exit_code=0, process=run.process)
    if run.refusal:
        return replace(known, exit_code=run.refusal["exit_code"], refused=str(run.refusal.get("why")))
    return known


def _state(run: RunFacts) -> str:
    if run.summary:
        return str(run.summary.get("status"))
    if isinstance(run.error, GaveUp):
        return "gave_up"
    if isinstance(run.error, Stopped):
        return "preempted"
    if run.error is not None:
        return "failed"
    if run.is_closed:
        return "completed" if run.step >= run.planned else "closed"
    if run.is_closed is False:
        return "ended"
    if run.process is not None:
        return "running"
    if not run.is_run:
        return "none"
    return "failed" if run.failure else "killed"


def _status(run: RunFacts, state: str) -> str:
    is_complete, verdict, incidents = state == "completed", run.summary.get("verdict"), run.incidents
    if state in ("killed", "failed", "gave_up", "preempted"):
        return state
    if is_complete and verdict in _VERDICTS:
        return str(verdict)
    is_clean = all(one.is_accepted for one in incidents)
    if not is_clean:
        if incidents[-1].outcome is Outcome.GAVE_UP and not is_complete:
            return "gave_up"
        if unrecovered(incidents, run.step) is not None:
            return "unrecovered"
        if any(one.is_observed for one in incidents):
            return "observed"
    if is_complete and run.is_above_best:
        return "above_best"
    if is_complete and run.is_stalled:
        return "no_progress"
    if is_clean:
        return "unjudged" if is_complete and run.is_unjudged else "well"
    is_open = any(one.outcome is None for one in incidents)
    return "recovering" if is_open and not is_complete else "recovered"


def unrecovered(incidents: Sequence[Incident], step: int) -> Incident | None:
    """Return one that is unrecovered, or that came back, with none of its kind later that was over.

    What came back up to an earlier end of the run, and not since it was extended, does not count.
    """
    newest = {one.kind: one for one in incidents}.values()
    left = (one for one in newest if one.outcome is Outcome.RECURRED and step < one.last_step + _QUIET)
    return next((one for one in incidents if one.outcome is Outcome.UNRECOVERED), next(left, None))
