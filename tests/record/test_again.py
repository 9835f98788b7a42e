"""An incident that counts the updates in which the same operation broke again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from resilient_train.durable.incident_log import IncidentLog
from resilient_train.ground.types import Action, Anomaly, Cause, Culprit, Decision, Diagnosis, Outcome, Signal

SKIP = Decision((Action("skip"),))
LOSS = Signal.NONFINITE_LOSS
LOG = Diagnosis(Cause.OPERATION, culprit=Culprit("forward", "log", "", "loss.py", 3))


def nan(tick: int) -> Anomaly:
    return Anomaly(LOSS, tick, tick, 0, landed=False)


def met(book: IncidentLog, times: int) -> None:
    first = 1 + sum(len(one.each) for one in book.incidents)
    for tick in range(first, first + times):
        if (before := book.continued(LOSS, LOG, SKIP)) is not None:
            book.count_again(before, nan(tick))
        else:
            book.record_treatment(book.open(nan(tick), LOG, SKIP))


def test_a_kill_loses_none_of_the_counts(tmp_path: Path) -> None:
    """Strikes and budgets count updates: a run that is killed often has not met fewer."""
    book = IncidentLog(tmp_path)
    for times in (20, 3, 90):
        met(book, times)
        again = IncidentLog(tmp_path)
        assert again.incidents == book.incidents
        book = again
    assert [one.anomaly.tick for incident in book.incidents for one in incident.each] == list(range(1, 114))
    assert [one.further for one in book.incidents] == [64, 47]


@pytest.mark.parametrize(
    ("times", "ends", "outcome"), [(10, 12, Outcome.RECURRED), (10, 59, Outcome.RECOVERED), (1, 10, Outcome.RECOVERED)]
)
def test_one_that_came_again_before_the_end_has_recurred(times: int, ends: int, outcome: Outcome) -> None:
    book = IncidentLog(None)
    met(book, times)
    book.close_all(Outcome.RECOVERED, healthy_since=ends - 50)
    assert [one.outcome for one in book.incidents] == [outcome]


@pytest.mark.parametrize(("remedy", "outcome"), [("skip", Outcome.RECURRED), ("armor", Outcome.RECOVERED)])
def test_the_last_of_a_row_that_is_only_skipped_has_recurred(tmp_path: Path, remedy: str, outcome: Outcome) -> None:
    """Where nothing names the line each is an incident of its own. Another treatment may have held."""
    book, decisions = IncidentLog(tmp_path), [SKIP, SKIP, Decision((Action(remedy),))]
    for tick, decision in enumerate(decisions, start=100):
        anomaly = Anomaly(LOSS, tick, tick, tick - 1, landed=False)
        book.record_treatment(book.open(anomaly, Diagnosis(Cause.UNKNOWN), decision))
    book.close_all(Outcome.RECOVERED, healthy_since=60)
    assert [one.outcome for one in book.incidents] == [Outcome.RECURRED, Outcome.RECURRED, outcome]


UNKNOWN = Diagnosis(Cause.UNKNOWN)
NO_BATCH = Diagnosis(Cause.DATA, rows=(3,))


@pytest.mark.parametrize(
    ("diagnosis", "decision", "first", "second", "is_counted"),
    [
        (LOG, SKIP, LOSS, LOSS, True),
        (UNKNOWN, SKIP, LOSS, LOSS, True),
        (UNKNOWN, SKIP, LOSS, Signal.NONFINITE_GRAD, False),
        (UNKNOWN, SKIP, Signal.EXCEPTION, Signal.EXCEPTION, False),
        (UNKNOWN, Decision((Action("skip"), Action("lower_lr"))), LOSS, LOSS, False),
        (NO_BATCH, SKIP, LOSS, LOSS, False),
    ],
)
def test_what_is_only_skipped_again_is_counted(
    diagnosis: Diagnosis, decision: Decision, first: Signal, second: Signal, is_counted: bool
) -> None:
    """Not an incident each time, also where nothing is known but the signal: a loop that makes its loss itself."""
    book = IncidentLog(None)
    book.record_treatment(book.open(replace(nan(1), signal=first), diagnosis, SKIP))
    assert (book.continued(second, diagnosis, decision) is not None) is is_counted
