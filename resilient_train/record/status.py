"""How a run stands and how it ended, from facts: of each table the first rule that applies answers.

The process of a run asks at its end, and writes the answer to summary.json; all others ask about its directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resilient_train.errors import GaveUp, Stopped, TrainError, short_message
from resilient_train.types import Incident, Outcome, kind_of

_QUIET = 50  # updates without what came back, after which it is over


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    incidents: Sequence[Incident] = ()
    step: int = 0  # accepted updates
    # Known to its process, at its end.
    error: BaseException | None = None  # that ends it
    is_closed: bool | None = None  # by the command or `guard.close`; False: the loop was left
    planned: int = 0  # updates
    is_stalled: bool = False  # its loss did not fall
    is_above_best: bool = False  # its loss ended far above its best level
    # Known from its directory.
    summary: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""  # the error that a rank other than 0 noted
    refusal: Mapping[str, Any] = field(default_factory=dict)  # of the last start
    process: str | None = None  # that is at work
    is_run: bool = True

    @property
    def met(self) -> Sequence[Incident]:
        """Its incidents; none if all were changes on purpose."""
        return () if all(one.is_accepted for one in self.incidents) else self.incidents


@dataclass(frozen=True)
class Status:
    state: str  # the status in summary.json; without one running, none, failed, killed
    status: str  # how the training fares
    exit_code: int
    why: str = ""  # it failed, gave up or stopped
    refused: str = ""  # why the last start was refused, whose exit code this is then
    process: str | None = None  # that is at work: it has not begun yet, or is about to end, if there is a summary
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The word in summary.json."""
        if self.state != "completed":
            return self.state
        return "well" if self.status == "clean" else self.status

    def written(self) -> dict[str, Any]:
        """Return its fields of summary.json."""
        return {"status": self.state, "exit_code": self.exit_code, "verdict": self.verdict, "why": self.why or None}

    @property
    def in_mlflow(self) -> str:
        """MLflow's word. A run that is not back at its level has not succeeded."""
        return "FAILED" if self.status in ("gave_up", "unrecovered") else _IN_MLFLOW.get(self.state, "FAILED")


_STATES: tuple[tuple[str, Callable[[RunFacts], bool]], ...] = (
    ("gave_up", lambda run: isinstance(run.error, GaveUp)),
    ("preempted", lambda run: isinstance(run.error, Stopped)),
    ("failed", lambda run: run.error is not None),
    ("completed", lambda run: run.is_closed is True and run.step >= run.planned),
    ("closed", lambda run: run.is_closed is True),
    ("ended", lambda run: run.is_closed is False),
    ("running", lambda run: run.process is not None),
    ("none", lambda run: not run.is_run),
    ("failed", lambda run: run.failure != ""),
    ("killed", lambda run: True),
)
_EXIT_CODES = {"completed": 0, "closed": 0, "running": 0, "none": 2}  # others: 1; an error has its own
_IN_MLFLOW = {"completed": "FINISHED", "closed": "FINISHED", "ended": "FINISHED"}
_IN_MLFLOW |= {"preempted": "KILLED", "killed": "KILLED"}

_STATUSES: tuple[tuple[str, Callable[[RunFacts, str], bool]], ...] = (
    ("failed", lambda run, state: state in ("failed", "killed")),
    ("gave_up", lambda run, state: state == "gave_up"),
    ("preempted", lambda run, state: state == "preempted"),
    ("gave_up", lambda run, state: state != "completed" and [one.outcome for one in run.met[-1:]] == [Outcome.GAVE_UP]),
    ("unrecovered", lambda run, state: unrecovered(run.met, run.step) is not None),
    ("observed", lambda run, state: any(one.is_observed for one in run.met)),
    ("above_best", lambda run, state: state == "completed" and run.is_above_best),
    ("no_progress", lambda run, state: state == "completed" and run.is_stalled),
    ("clean", lambda run, state: not run.met),
    ("recovering", lambda run, state: state != "completed" and any(one.outcome is None for one in run.met)),
    ("recovered", lambda run, state: True),
)
_WORDS = {word for word, _ in _STATUSES}


def status_of(run: RunFacts) -> Status:
    """Say how a run stands or ended. What its own process has written goes before what others can tell."""
    state = next(name for name, applies in _STATES if applies(run))
    exit_code = run.error.exit_code if isinstance(run.error, TrainError | Stopped) else _EXIT_CODES.get(state, 1)
    if run.summary:
        state, exit_code = str(run.summary.get("status")), run.summary["exit_code"]
    status = run.summary.get("verdict")
    if state != "completed" or status not in _WORDS:
        status = next(name for name, applies in _STATUSES if applies(run, state))
    error = "" if run.error is None else short_message(run.error)
    why = str(run.summary.get("why") or run.failure or error) if exit_code else ""
    if run.process is not None:
        return Status(state, status, 0, why, process=run.process, summary=run.summary)
    refused = str(run.refusal.get("why")) if run.refusal else ""
    exit_code = run.refusal["exit_code"] if run.refusal else exit_code
    return Status(state, status, exit_code, why, refused, summary=run.summary)


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
