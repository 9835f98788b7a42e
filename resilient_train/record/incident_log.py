"""The incidents of a run, from opening to outcome: the one list of them.

Each change is written to the journal as it happens; incidents.jsonl has a line for each once its outcome is known.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from resilient_train.files import commit_text, open_to_append, read_plain
from resilient_train.record.drills import made_by
from resilient_train.record.facts import Facts
from resilient_train.record.incident_lines import as_line, from_line
from resilient_train.record.journal import JOURNAL, Entry, Journal
from resilient_train.record.surroundings import RESUME, Surroundings, Timed
from resilient_train.types import Anomaly, Cause, Decision, Diagnosis, Incident, Outcome, Signal, Vitals, kind_of
from resilient_train.wording import describe, describe_outcome, log

INCIDENTS = "incidents.jsonl"  # its name in a run directory

OPENED, TREATED, CLOSED = "incident_opened", "incident_treated", "incident_closed"
PHASE = "incident_phase"  # a part of an incident that came after its entry
_TRAINING_CONTINUES = {Signal.DISK_FULL, Signal.CHECKPOINT_FAILED}


class IncidentLog:
    """Keeps them; on ranks without the run directory only in memory."""

    def __init__(self, directory: Path | None, journal: Journal | None = None, *, place: Path | None = None) -> None:
        """Recall what the journal holds, by default that of the directory, and rewrite incidents.jsonl if it differs.

        `place` is the run directory, also on ranks that keep no journal in it.
        """
        self.directory, self.place = directory, place or directory
        self._file = None if directory is None else directory / INCIDENTS
        self._journal = journal = None if directory is None else journal or Journal(directory / JOURNAL)
        self.facts = Facts(journal)
        self._incidents: dict[int, Incident] = {}
        self._lines: dict[int, str] = {}  # of incidents.jsonl, in the order of their outcomes
        self._treated: set[int] = set()
        self._standing: dict[
            int, int
        ] = {}  # treated incidents after which no update was accepted yet: since when, in ms
        self._lasting: set[int] = set()  # incidents that are not over, however healthy updates are
        for entry in journal.entries if journal else []:
            self._recall(entry)
        self._incidents = dict(sorted(self._incidents.items()))
        for number, one in self._incidents.items():
            if one.outcome is None and number not in self._treated:  # the process ended before it did what was decided
                self._incidents[number] = replace(one, decision=replace(one.decision, actions=()))
        self._open = [one.id for one in self.incidents if one.outcome is None]
        self._is_current = self._holds(self._file)
        self._is_failing = False
        self._rewrite()
        self._surroundings = Surroundings(directory, self.incidents)

    @property
    def incidents(self) -> list[Incident]:
        """All incidents, open ones included, in the order they were met."""
        return list(self._incidents.values())

    @property
    def of_training(self) -> list[Incident]:
        """Those that are not about the process alone, of which other ranks may not know."""
        return [one for one in self.incidents if one.diagnosis.cause is not Cause.PROCESS]

    @property
    def open_ones(self) -> list[Incident]:
        """Those whose outcome is not known yet."""
        return [self._incidents[number] for number in self._open]

    @property
    def next_id(self) -> int:
        """The number of the next incident."""
        return max(self._incidents, default=0) + 1

    def tally(self) -> dict[str, Any]:
        """Count them: `{"total", "recovered", "by_cause"}`."""
        by_cause: dict[str, int] = {}
        for one in self.incidents:
            by_cause[str(one.diagnosis.cause)] = by_cause.get(str(one.diagnosis.cause), 0) + 1
        recovered = sum(one.outcome is Outcome.RECOVERED for one in self.incidents)
        return {"total": len(self.incidents), "recovered": recovered, "by_cause": by_cause}

    def adopt(self, incidents: Iterable[Incident]) -> None:
        """On a rank without a journal: take the incidents that rank 0 read from it, as all ranks decide by them."""
        self._incidents = {one.id: one for one in incidents}
        self._open = [one.id for one in self.incidents if one.outcome is None]

    # From opening to outcome.

    def open(self, anomaly: Anomaly, diagnosis: Diagnosis, decision: Decision, *, is_off: bool = False) -> Incident:
        """Add an incident before anything is done about it; open ones of the same kind have recurred by it.

        If the decision is to give up, everything that is still open has failed, this one included: where the loss
        `is_off` from where it was, what left damage is unrecovered. The caller closes this one.
        """
        drill = made_by(self.facts.struck, anomaly, diagnosis, self.incidents)
        diagnosis = replace(diagnosis, advice="") if drill else diagnosis  # of what was made on purpose
        for one in self.open_ones:
            if kind_of(one.anomaly, one.diagnosis) == kind_of(anomaly, diagnosis):
                self.close(one, Outcome.RECURRED)
            elif decision.gave_up is not None:
                self.close(one, _failed(one, is_off=is_off))
        incident = Incident(self.next_id, anomaly, diagnosis, decision, drill=drill)
        if decision.gave_up is not None:
            incident = replace(incident, outcome=_failed(incident, is_off=is_off))
        self.add(incident)
        return incident

    def add(self, incident: Incident) -> None:
        """Write an incident down as it was opened."""
        if incident.outcome is None:
            self._open.append(incident.id)
        self._note(OPENED, incident)

    def treated(self, incident: Incident, phases: Sequence[Timed] = (), *, lasts: bool = False) -> None:
        """Note what was done about an incident, and when. One that `lasts` is not over until `over` is called."""
        self._training_stands(incident, self._note(TREATED, incident, phases))
        self._surroundings.treated(incident)
        if lasts:
            self._lasting.add(incident.id)
        log.warning("%s", describe(incident))

    def amend(self, incident: Incident) -> None:
        """Note what else is known of an incident that was treated."""
        self._note(TREATED, incident)

    def close(
        self,
        incident: Incident,
        outcome: Outcome | None = None,
        phases: Sequence[Timed] = (),
        *,
        healthy_steps: int | None = None,
    ) -> None:
        """Note the outcome of an incident, by default the one it has, and list it.

        One that was never treated has its phases here.
        """
        incident = replace(incident, outcome=outcome or incident.outcome)
        assert incident.outcome is not None, f"incident {incident.id} has no outcome yet"
        if incident.id in self._open:
            self._open.remove(incident.id)
        self._note(CLOSED, incident, phases)
        self._standing.pop(incident.id, None)
        line = self._list(incident)
        if self._file is not None and self._is_current:
            try:
                with open(open_to_append(self._file), "a", encoding="utf-8") as file:
                    file.write(line)
            except OSError as error:
                self._fell_behind(error)
        else:
            self._rewrite()
        if phases:
            self._surroundings.treated(incident)
        else:
            self._surroundings.closed(incident)
        if incident.outcome is Outcome.RECOVERED:  # what recurs is reported by the incident that it recurs in
            log.info("%s", describe_outcome(incident, healthy_steps))

    def accepted(self, step: int, *, after: int, is_held: bool) -> None:
        """The `step`-th accepted update was healthy: close what has recovered, `after` steps beyond where the run was.

        While the loss `is_held` against where it was before damage, only those recover that left none.
        """
        self.continued()
        for one in self.open_ones:
            reached = one.anomaly.step - (not one.anomaly.landed)
            is_over = step >= reached + after and one.id not in self._lasting
            if is_over and not (is_held and one.left_damage):
                self.close(one, Outcome.RECOVERED, healthy_steps=after)

    def over(self, number: int) -> None:
        """Note that an incident does not last any longer: from now on healthy updates count."""
        self._lasting.discard(number)

    def finish(self, outcome: Outcome) -> None:
        """The training has ended: what is open has recovered, or come to `outcome` if it left damage.

        What lasts stays open until `end_lasting`.
        """
        for one in self.open_ones:
            if one.id not in self._lasting:
                self.close(one, outcome if one.left_damage else Outcome.RECOVERED)

    def end_lasting(self, number: int) -> None:
        """The run has ended: close an incident that lasted beyond the training, if it is still open."""
        outcome = Outcome.UNRECOVERED if number in self._lasting else Outcome.RECOVERED
        self._lasting.discard(number)
        if number in self._open:
            self.close(self._incidents[number], outcome)

    def continued(self) -> None:
        """Note that an update was accepted: the training continues after what was treated before it."""
        if self._standing:
            now = time.time_ns() // 1_000_000
            for number, since in list(self._standing.items()):
                self.came_after(number, (RESUME, since, max(since, now)))

    def came_after(self, number: int, phase: Timed) -> None:
        """Note a part of an incident that was not over when its entry was written."""
        self._standing.pop(number, None)
        if self._journal is not None:
            self._journal.write(PHASE, number=number, phase=phase)

    def measured(self, vitals: Vitals) -> None:
        """Keep what an update measured, for the table of the measurements around an incident."""
        self._surroundings.heard(vitals)

    def write_tables(self) -> None:
        """Write what was measured after the last incident, as far as it is known."""
        self._surroundings.close()

    def end(self) -> None:
        """Try a last time what could not be written."""
        self._rewrite()
        if self._journal is not None:
            self._journal.close()

    # How it is written and read.

    def _note(self, kind: str, incident: Incident, phases: Sequence[Timed] = ()) -> Entry | None:
        self._incidents[incident.id] = incident
        if self._journal is None:
            return None
        when = {"phases": phases} if phases else {}
        return self._journal.write(kind, incident=as_line(incident), **when)

    def _training_stands(self, incident: Incident, entry: Entry | None) -> None:
        """From now on the training stands still, unless that was noted already, or it continued all the while."""
        if entry is None or incident.id in self._treated:
            return
        self._treated.add(incident.id)
        if incident.anomaly.signal not in _TRAINING_CONTINUES:
            self._standing[incident.id] = entry["at"]

    def _recall(self, entry: Entry) -> None:
        kind = entry["kind"]
        if kind == PHASE and type(entry.get("number")) is int:
            self._standing.pop(entry["number"], None)
        elif kind in (OPENED, TREATED, CLOSED):
            try:
                incident = from_line(entry.get("incident"))
            except ValueError as error:
                log.warning("entry %d of the journal is left out: %s", entry["n"], error)
                return
            self._incidents[incident.id] = incident
            if kind == TREATED:
                self._training_stands(incident, entry)
            elif kind == CLOSED:
                self._standing.pop(incident.id, None)
                self._list(incident)

    def _list(self, incident: Incident) -> str:
        self._lines[incident.id] = json.dumps(as_line(incident)) + "\n"
        return self._lines[incident.id]

    def _holds(self, file: Path | None) -> bool:
        try:
            return file is None or read_plain(file) == "".join(self._lines.values()).encode()
        except OSError:
            return False

    def _rewrite(self) -> None:
        if self._file is None or self._is_current:
            return
        try:
            commit_text(self._file, "".join(self._lines.values()))
            self._is_current, self._is_failing = True, False
        except OSError as error:
            self._fell_behind(error)

    def _fell_behind(self, error: OSError) -> None:
        self._is_current = False
        if not self._is_failing:
            why = error.strerror or error
            log.warning("%s cannot be written (%s): it will be rewritten from the journal later", self._file, why)
        self._is_failing = True


def recalled(entries: Iterable[Entry]) -> list[Incident]:
    """Return the incidents of a journal as they stand, those that are open included."""
    found: dict[int, Incident] = {}
    for entry in entries:
        if entry["kind"] in (OPENED, TREATED, CLOSED):
            with contextlib.suppress(ValueError):  # damaged: the book says so when the run is taken up
                incident = from_line(entry.get("incident"))
                found[incident.id] = incident
    return [found[number] for number in sorted(found)]


def _failed(incident: Incident, *, is_off: bool) -> Outcome:
    was_off = incident.anomaly.signal is Signal.NOT_RECOVERED or (is_off and incident.decision.gave_up is None)
    return Outcome.UNRECOVERED if was_off and incident.left_damage else Outcome.GAVE_UP
