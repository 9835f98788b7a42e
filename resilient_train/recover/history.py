"""Incidents from opening to outcome. Pure bookkeeping: it returns what changed, and the caller writes it down."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from resilient_train.events import Anomaly, Cause, Decision, Diagnosis, Incident, Outcome


class History:
    """All incidents of a run in the order they were met."""

    def __init__(self, incidents: Iterable[Incident] = (), *, recovered_after: int) -> None:
        """Take up what was journalled: of several incidents with one id the last counts.

        An incident that was open begins anew to wait for its `recovered_after` accepted updates.
        """
        self.recovered_after = recovered_after
        self.incidents: list[Incident] = list({incident.id: incident for incident in incidents}.values())
        self._places = {incident.id: place for place, incident in enumerate(self.incidents)}
        self.lasting: set[int] = set()  # incidents that are not over, however healthy updates are
        self._accepted = 0  # updates that no rewind has undone
        self._open = {incident.id: 0 for incident in self.incidents if incident.outcome is None}  # id -> accepted then

    def open(self, anomaly: Anomaly, diagnosis: Diagnosis, decision: Decision) -> tuple[Incident, list[Incident]]:
        """Add an incident; return it, and those whose outcome is known by it.

        Where the decision is to give up, it is closed itself, and so is everything that was still open.
        """
        before = [self.incidents[self._places[number]] for number in self._open]
        same = [one for one in before if kind_of(one.anomaly, one.diagnosis) == kind_of(anomaly, diagnosis)]
        closed = [self._close(one, Outcome.RECURRED) for one in same]
        number = max(self._places, default=0) + 1
        incident = Incident(number, anomaly, diagnosis, decision)
        if decision.gave_up is not None:
            closed += [self._close(one, Outcome.GAVE_UP) for one in before if one not in same]
            incident = dataclasses.replace(incident, outcome=Outcome.GAVE_UP)
        else:
            self._open[number] = self._accepted
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

    def healthy_since(self) -> dict[int, int]:
        """How many healthy updates each open incident has waited."""
        return {number: self._accepted - then for number, then in self._open.items()}

    def was_healthy(self, since: Mapping[int, int]) -> None:
        """Let open incidents go on waiting where an earlier process has left them."""
        self._accepted = max([self._accepted, *since.values()])
        self._open = {number: self._accepted - since.get(number, 0) for number in self._open}

    def accepted(self) -> Sequence[Incident]:
        """Note an accepted and healthy update; return the incidents that have recovered by it."""
        if not self._open:
            return ()
        self._accepted += 1
        return self._recovered(self._accepted - self.recovered_after)

    def undone(self, steps: int) -> None:
        """Note that a rewind has undone accepted updates: an incident has to wait for others in their place."""
        self._accepted = max(0, self._accepted - steps)
        self._open = {number: min(then, self._accepted) for number, then in self._open.items()}

    def finish(self) -> Sequence[Incident]:
        """Note that the run has ended healthy; return the incidents that have recovered by it."""
        self.lasting.clear()
        return self._recovered(self._accepted)

    def tally(self) -> dict[str, Any]:
        """Count them: `{"total", "recovered", "by_cause"}`."""
        by_cause: dict[str, int] = {}
        for incident in self.incidents:
            cause = str(incident.diagnosis.cause)
            by_cause[cause] = by_cause.get(cause, 0) + 1
        recovered = sum(incident.outcome is Outcome.RECOVERED for incident in self.incidents)
        return {"total": len(self.incidents), "recovered": recovered, "by_cause": by_cause}

    def _recovered(self, opened_until: int) -> list[Incident]:
        ripe = [
            number for number, opened in self._open.items() if opened <= opened_until and number not in self.lasting
        ]
        return [self._close(self.incidents[self._places[number]], Outcome.RECOVERED) for number in ripe]

    def _close(self, incident: Incident, outcome: Outcome) -> Incident:
        del self._open[incident.id]
        closed = dataclasses.replace(incident, outcome=outcome)
        self.treated(closed)
        return closed


def kind_of(anomaly: Anomaly, diagnosis: Diagnosis) -> tuple[object, ...]:
    """What makes two incidents the same trouble: the cause, and the line or the rows, not the values that it met there.

    Where the cause is not known, or is the process, two signals are not said to have the same one.
    """
    culprit = diagnosis.culprit
    line = culprit and (culprit.phase, culprit.op, culprit.module, culprit.file, culprit.line)
    is_told_by_signal = diagnosis.cause in (Cause.UNKNOWN, Cause.PROCESS)
    return diagnosis.cause, line, diagnosis.rows, anomaly.signal if is_told_by_signal else None
