"""Incidents from opening to outcome. Pure bookkeeping: it returns what changed, and the caller writes it down."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from resilient_train.types import Anomaly, Cause, Decision, Diagnosis, Incident, Outcome, Signal


class History:
    """All incidents of a run in the order they were met."""

    def __init__(self, incidents: Iterable[Incident] = (), *, recovered_after: int) -> None:
        """Take up what was journalled: of several incidents with one id the last counts.

        An incident that was open goes on waiting for `recovered_after` steps beyond where the run had been.
        """
        self.recovered_after = recovered_after
        self.incidents: list[Incident] = list({incident.id: incident for incident in incidents}.values())
        self._places = {incident.id: place for place, incident in enumerate(self.incidents)}
        self.lasting: set[int] = set()  # incidents that are not over, however healthy updates are
        self._open = [incident.id for incident in self.incidents if incident.outcome is None]

    @property
    def open_ones(self) -> list[Incident]:
        """Those whose outcome is not known yet."""
        return [self.incidents[self._places[number]] for number in self._open]

    def open(
        self, anomaly: Anomaly, diagnosis: Diagnosis, decision: Decision, *, is_off: bool = False, drill: str = ""
    ) -> tuple[Incident, list[Incident]]:
        """Add an incident; return it, and those whose outcome is known by it.

        Where the decision is to give up, it is closed itself, and so is everything that was still open: where the loss
        `is_off` from where it was, what left damage is unrecovered.
        """
        before = self.open_ones
        same = [one for one in before if kind_of(one.anomaly, one.diagnosis) == kind_of(anomaly, diagnosis)]
        closed = [self._close(one, Outcome.RECURRED) for one in same]
        number = max(self._places, default=0) + 1
        incident = Incident(number, anomaly, diagnosis, decision, drill=drill)
        if decision.gave_up is not None:
            rest = [one for one in before if one not in same]
            closed += [self._close(one, _in_vain(one, is_off=is_off)) for one in rest]
            incident = dataclasses.replace(incident, outcome=_in_vain(incident, is_off=is_off))
        else:
            self._open.append(number)
        self._places[number] = len(self.incidents)
        self.incidents.append(incident)
        return incident, closed

    def treated(self, incident: Incident) -> None:
        """Put an incident, of which more is known now, in its place."""
        self.incidents[self._places[incident.id]] = incident

    @property
    def of_training(self) -> list[Incident]:
        """Those that are no matter of the process alone, of which other ranks may know nothing."""
        return [one for one in self.incidents if one.diagnosis.cause is not Cause.PROCESS]

    def ended(self, number: int) -> Incident:
        """Note that the run ends by an incident, whatever becomes of others; return it."""
        return self._close(self.incidents[self._places[number]], Outcome.GAVE_UP)

    def accepted(self, step: int, *, is_held: bool) -> Sequence[Incident]:
        """Return the incidents that have recovered with the `step`-th accepted update, which was healthy.

        Each of them as the run is `recovered_after` steps beyond where it had been: a rewind takes steps back. While
        the loss `is_held` against where it was before damage, only those recover that left none.
        """
        if not self._open:
            return ()
        ripe = [one for one in self.open_ones if self._is_over(one, step) and not (is_held and left_damage(one))]
        return [self._close(one, Outcome.RECOVERED) for one in ripe]

    def _is_over(self, incident: Incident, step: int) -> bool:
        reached = incident.anomaly.step - (not incident.anomaly.landed)
        return step >= reached + self.recovered_after and incident.id not in self.lasting

    def finish(self, outcome: Outcome = Outcome.RECOVERED) -> Sequence[Incident]:
        """Note that the training has ended; return all that were open: those that left damage have come to `outcome`.

        What lasts stays open until `end_lasting`.
        """
        over = [one for one in self.open_ones if one.id not in self.lasting]
        return [self._close(one, outcome if left_damage(one) else Outcome.RECOVERED) for one in over]

    def end_lasting(self, number: int) -> Sequence[Incident]:
        """Note that the run has ended for an incident that lasted beyond the training; return it if it was open."""
        outcome = Outcome.UNRECOVERED if number in self.lasting else Outcome.RECOVERED
        self.lasting.discard(number)
        return [self._close(self.incidents[self._places[number]], outcome)] if number in self._open else []

    def tally(self) -> dict[str, Any]:
        """Count them: `{"total", "recovered", "by_cause"}`."""
        by_cause: dict[str, int] = {}
        for incident in self.incidents:
            cause = str(incident.diagnosis.cause)
            by_cause[cause] = by_cause.get(cause, 0) + 1
        recovered = sum(incident.outcome is Outcome.RECOVERED for incident in self.incidents)
        return {"total": len(self.incidents), "recovered": recovered, "by_cause": by_cause}

    def _close(self, incident: Incident, outcome: Outcome) -> Incident:
        self._open.remove(incident.id)
        closed = dataclasses.replace(incident, outcome=outcome)
        self.treated(closed)
        return closed


def left_damage(incident: Incident) -> bool:
    """Whether an incident is over only when the loss is back: bad updates landed.

    What was changed outside of an update is gone with a rewind.
    """
    if incident.diagnosis.cause is Cause.PROCESS:
        return False
    if incident.diagnosis.cause is Cause.CORRUPTION and incident.rewound_to is not None:
        return False
    return incident.anomaly.is_in_weights


def _in_vain(incident: Incident, *, is_off: bool) -> Outcome:
    was_off = incident.anomaly.signal is Signal.NOT_RECOVERED or (is_off and incident.decision.gave_up is None)
    return Outcome.UNRECOVERED if was_off and left_damage(incident) else Outcome.GAVE_UP


def kind_of(anomaly: Anomaly, diagnosis: Diagnosis) -> tuple[object, ...]:
    """What makes two incidents the same trouble: the cause, and the line or the rows, not the values that it met there.

    Where the cause is not known, or is the process, two signals are not said to have the same one.
    """
    culprit = diagnosis.culprit
    line = culprit and (culprit.phase, culprit.op, culprit.module, culprit.file, culprit.line)
    is_told_by_signal = diagnosis.cause in (Cause.UNKNOWN, Cause.PROCESS)
    return diagnosis.cause, line, diagnosis.rows, anomaly.signal if is_told_by_signal else None
