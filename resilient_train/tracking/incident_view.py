"""An incident in words: the terminal, the report, traces, pictures and tags all print these."""

from __future__ import annotations

from dataclasses import dataclass

from resilient_train.tracking.story import Chapter
from resilient_train.types import Outcome
from resilient_train.wording import (
    OUTCOMES,
    describe_arms,
    describe_cost,
    describe_culprit,
    drill_suffix,
    noticed,
    reached_suffix,
    remedies_of,
    rows_named,
    why_of,
)

HARMFUL = (Outcome.UNRECOVERED, Outcome.GAVE_UP)  # what came back later has an incident of its own


@dataclass(frozen=True, slots=True)
class IncidentView:
    """What there is to say about an incident, each in one phrase; empty where there is nothing to say."""

    noticed: str
    drill: str  # to append to what was noticed
    cause: str
    rows: str
    culprit: str
    symptom: str
    remedy: str
    arms: tuple[str, ...]  # the lines of a table: how the arms of a trial went
    cost: str
    outcome: str
    advice: str

    @classmethod
    def of(cls, chapter: Chapter) -> IncidentView:
        """Put an incident into words."""
        incident, anomaly, diagnosis = chapter.incident, chapter.incident.anomaly, chapter.incident.diagnosis
        remedy = remedies_of(incident) or "nothing was done"
        is_treated = chapter.treated_ms is not None or incident.outcome is not None
        if incident.decision.gave_up is not None:
            remedy = f"gave up: {why_of(incident)}"
        elif not is_treated:
            remedy = "being treated"
        is_let_through = anomaly.landed or incident.is_observed
        return cls(
            noticed=noticed(anomaly, by_name=False) + (reached_suffix(incident) if is_let_through else ", refused"),
            drill=drill_suffix(incident),
            cause=str(diagnosis.cause),
            rows=rows_named(diagnosis.rows) if diagnosis.rows else "",
            culprit="" if diagnosis.culprit is None else describe_culprit(diagnosis.culprit),
            symptom="" if diagnosis.symptom is None else describe_culprit(diagnosis.symptom),
            remedy=remedy,
            arms=tuple(describe_arms(incident)),
            cost=describe_cost(incident),
            outcome=OUTCOMES[incident.outcome] if is_treated else "being treated",
            advice="" if incident.drill else diagnosis.advice,
        )
