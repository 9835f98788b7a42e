"""How a run stands and how it ended, from facts: the first rule that applies answers.

The process of a run asks at its end, and writes the answer to summary.json; all others ask about its directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from resilient_train.errors import GaveUp, Stopped, TrainError, short_message
from resilient_train.types import Incident, Outcome, kind_of

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
        fared = "well" if self.status == "clean" else self.status
        verdict = fared if self.state == "completed" else self.state
        return {"status": self.state, "exit_code": self.exit_code, "verdict": verdict, "why": self.why or None}

    @property
    def in_mlflow(self) -> str:
        """MLflow's word. A run that is not back at its level has not succeeded."""
        return "FAILED" if self.status in ("gave_up", "unrecovered") else _IN_MLFLOW.get(self.state, "FAILED")


_EXIT_CODES = {"completed": 0, "closed": 0, "running": 0, "none": 2}  # others: 1; an error has its own
_IN_MLFLOW = {"completed": "FINISHED", "closed": "FINISHED", "ended": "FINISHED"}
_IN_MLFLOW |= {"preempted": "KILLED", "killed": "KILLED"}


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
    if state == "killed":
        return "failed"
    if state in ("failed", "gave_up", "preempted"):
        return state
    if is_complete and verdict:
        return "clean" if verdict == "well" else str(verdict)
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
        return "clean"
    is_open = any(one.outcome is None for one in incidents)
    return "recovering" if is_open and not is_complete else "recovered"


def unrecovered(incidents: Sequence[Incident], step: int) -> Incident | None:
    """Return one that is unrecovered, or that came back, with none of its kind later that was over.

    What was before the run gave up does not count: it was started with other settings since. Nor does what came back
    up to an earlier end of the run, and not since it was extended.
    """
    given_up = max((place for place, one in enumerate(incidents) if one.decision.gave_up is not None), default=-1)
    since = incidents[given_up + 1 :]
    newest = {kind_of(one.anomaly, one.diagnosis): one for one in since}.values()
    left = (one for one in newest if one.outcome is Outcome.RECURRED and step < one.last_step + _QUIET)
    return next((one for one in since if one.outcome is Outcome.UNRECOVERED), next(left, None))
