"""How a run stands and how it ended: one table of rows for all who ask."""

from __future__ import annotations

from typing import Any

import pytest
from stories import incident

from resilient_train.durable.endings import RunFacts, status_of
from resilient_train.ground.errors import ConfigError, GaveUp, Stopped, TrainError
from resilient_train.ground.types import ACCEPTED, OBSERVE, Action, Decision, Outcome

RUNS: dict[str, Any] = {"process": "process 7"}
COMPLETE = {"is_closed": True, "planned": 300, "step": 300}
NOTED = {"failure": "rank 1: ValueError"}
REFUSED = {"refusal": {"exit_code": 2, "why": "model.width: expected an int"}}


def written(status: str, exit_code: int, **more: Any) -> dict[str, Any]:
    return {"summary": {"status": status, "exit_code": exit_code, **more}}


@pytest.mark.parametrize(
    ("facts", "state", "code", "why", "in_mlflow"),
    [
        # Its own process, at its end.
        (COMPLETE, "completed", 0, "", "FINISHED"),
        ({"is_closed": True}, "completed", 0, "", "FINISHED"),  # without a plan
        (COMPLETE | {"step": 299}, "closed", 0, "", "FINISHED"),
        ({"is_closed": False}, "ended", 1, "", "KILLED"),
        ({"error": GaveUp("enough")}, "gave_up", 3, "enough", "FAILED"),
        ({"error": Stopped("asked")}, "preempted", 75, "asked", "KILLED"),
        ({"error": ConfigError("a", 1, "no")}, "failed", 2, "a=1: no", "FAILED"),
        ({"error": TrainError("lost")}, "failed", 1, "lost", "FAILED"),
        ({"error": ValueError("its own"), **COMPLETE}, "failed", 1, "ValueError: its own", "FAILED"),
        ({"error": TrainError("lost"), **NOTED}, "failed", 1, "rank 1: ValueError", "FAILED"),
        # A directory: what was written goes before what others can tell.
        (written("completed", 0), "completed", 0, "", "FINISHED"),
        (written("failed", 2, why="a=1: no") | NOTED, "failed", 2, "a=1: no", "FAILED"),
        (written("preempted", 75) | NOTED, "preempted", 75, "rank 1: ValueError", "KILLED"),
        (written("gave_up", 3) | RUNS, "gave_up", 0, "", "FAILED"),  # about to end
        (written("gave_up", 3) | REFUSED, "gave_up", 2, "", "FAILED"),
        (RUNS | NOTED, "running", 0, "", "FAILED"),
        (RUNS | REFUSED, "running", 0, "", "FAILED"),
        (NOTED, "failed", 1, "rank 1: ValueError", "FAILED"),
        ({"is_run": False}, "none", 2, "", "FAILED"),
        ({}, "killed", 1, "", "KILLED"),
        (REFUSED, "killed", 2, "", "KILLED"),
    ],
)
def test_the_state_and_the_exit_code(facts: Any, state: str, code: int, why: str, in_mlflow: str) -> None:
    found = status_of(RunFacts(**facts))
    assert (found.state, found.exit_code, found.in_mlflow) == (state, code, in_mlflow)
    assert found.why == why
    assert found.process == facts.get("process")
    assert bool(found.refused) == ("refusal" in facts and "process" not in facts)


OBSERVED = incident(1, Outcome.OBSERVED, decision=Decision((Action(OBSERVE),)))
ON_PURPOSE = incident(1, Outcome.RECURRED, decision=Decision((Action(ACCEPTED),)))
CURED, AGAIN, OFF, GAVE_UP = Outcome.RECOVERED, Outcome.RECURRED, Outcome.UNRECOVERED, Outcome.GAVE_UP
OPEN = None


@pytest.mark.parametrize(
    ("incidents", "running", "verdict"),
    [
        ([], "well", "well"),
        ([ON_PURPOSE], "well", "well"),
        ([OPEN], "recovering", "recovered"),
        ([CURED], "recovered", "recovered"),
        ([AGAIN, CURED], "recovered", "recovered"),
        ([AGAIN, OPEN], "recovering", "recovered"),
        ([AGAIN], "unrecovered", "unrecovered"),  # the last of its kind: nothing cured it
        ([CURED, AGAIN], "unrecovered", "unrecovered"),
        ([AGAIN, OFF], "unrecovered", "unrecovered"),
        ([AGAIN, GAVE_UP], "gave_up", "recovered"),
        ([GAVE_UP, AGAIN], "unrecovered", "unrecovered"),
        ([OPEN, CURED], "recovering", "recovered"),
        ([OPEN, GAVE_UP], "gave_up", "recovered"),
        ([GAVE_UP, CURED], "recovered", "recovered"),
        ([OBSERVED, CURED], "observed", "observed"),
        ([OBSERVED, ON_PURPOSE, AGAIN], "unrecovered", "unrecovered"),
    ],
)
def test_how_the_training_fares(incidents: list[Any], running: str, verdict: str) -> None:
    """In one word while it runs, and in summary.json once it is complete."""
    met = [one if one in (OBSERVED, ON_PURPOSE) else incident(1, one) for one in incidents]
    assert status_of(RunFacts(incidents=met, **RUNS)).status == running
    assert status_of(RunFacts(incidents=met, is_closed=True)).written()["verdict"] == verdict
    assert status_of(RunFacts(incidents=met, is_closed=False)).written()["verdict"] == "ended"
    assert status_of(RunFacts(incidents=met)).status == "killed"


@pytest.mark.parametrize(
    ("facts", "outcome", "status"),
    [
        ({"is_stalled": True}, CURED, "no_progress"),
        ({"is_stalled": True, "is_above_best": True}, CURED, "above_best"),
        ({"is_stalled": True, "is_above_best": True}, OFF, "unrecovered"),
        ({"is_stalled": True, "planned": 1}, CURED, "recovered"),  # closed before its end
        (written("completed", 0, verdict="no_progress"), CURED, "no_progress"),
        (written("completed", 0, verdict="well"), CURED, "well"),
        (written("failed", 1, verdict="unheard of"), CURED, "failed"),
        (written("closed", 0, verdict="closed"), OPEN, "recovering"),
    ],
)
def test_where_the_loss_ended(facts: Any, outcome: Outcome | None, status: str) -> None:
    """It is judged by the process of a run that is complete; others read what it wrote."""
    found = status_of(RunFacts(incidents=[incident(1, outcome)], is_closed=True, **facts))
    assert found.status == status
