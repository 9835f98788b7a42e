"""The incidents of a run, from opening to outcome: the one list of them.

Each change is written to the journal as it happens; incidents.jsonl has a line for each once its outcome is known.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from resilient_train.durable.journal import JOURNAL, Journal, LineFile
from resilient_train.durable.run_history import AGAIN, CLOSED, OPENED, TREATED, RunHistory, in_words
from resilient_train.ground.errors import in_one_line
from resilient_train.ground.files import commit
from resilient_train.ground.types import Action, Anomaly, Cause, Decision, Diagnosis, Incident, Outcome, Signal, kind_of
from resilient_train.ground.wording import describe, log

INCIDENTS = "incidents.jsonl"  # its name in a run directory
_Effects = Mapping[str, Any] | None  # of remedies: those that have changed
_OF_SAVING = (Signal.DISK_FULL, Signal.CHECKPOINT_FAILED)  # which healthy updates do not close
_AGAIN = 64  # updates that one incident counts, as each reading of it and each of its lines has them all


class IncidentLog(RunHistory):
    """The history of a run that is at work. Ranks that do not write to the run directory keep it in memory only."""

    def __init__(self, run_dir: Path | None, *, writes: bool = True) -> None:
        """One rank writes to the run directory, which the others may not have."""
        self.directory = directory = run_dir if writes else None
        self._journal = None if directory is None else Journal(directory / JOURNAL)
        super().__init__(self._journal.entries if self._journal else ())
        self.sinks: list[Any] = []  # an `extensions.Sink` each
        # The process ended before it did what was decided.
        undone = [one for one in self.open_incidents if one.id not in self.treated]
        self.adopt(*(replace(one, decision=replace(one.decision, actions=())) for one in undone))
        self._list = None
        if directory is not None:  # what a kill or a full disk has left out of the list, the journal has
            self._list = LineFile(directory / INCIDENTS, "the lines that it lacks are written later")
            lines = [_line(one) for one in self.incidents if one.outcome is not None]
            with self._list.attempts.attempt():
                commit(self._list.path, lines)

    @property
    def of_training(self) -> list[Incident]:
        return [one for one in self.incidents if one.diagnosis.cause is not Cause.PROCESS]

    @property
    def open_incidents(self) -> list[Incident]:
        return list(self.open_by_id.values())

    @property
    def next_id(self) -> int:
        return next(reversed(self.by_id), 0) + 1

    def tally(self) -> dict[str, Any]:
        by_cause = Counter(str(one.diagnosis.cause) for one in self.incidents)
        recovered = sum(one.outcome is Outcome.RECOVERED for one in self.incidents)
        return {"total": len(self.incidents), "recovered": recovered, "by_cause": dict(by_cause)}

    def note(self, kind: str, /, **fields: Any) -> None:
        """Write an entry, and keep what `recall` knows of it. Fields that are None are left out."""
        fields = {name: value for name, value in fields.items() if value is not None}
        self.recall({"kind": kind, "at": time.time_ns() // 1_000_000, **fields})
        if self._journal is not None:
            trees = {name: asdict(one) if isinstance(one, Incident) else one for name, one in fields.items()}
            self._journal.write(kind, **trees)
        if self.sinks:
            self.tell(
                kind, **{name: in_words(one) if isinstance(one, Incident) else one for name, one in fields.items()}
            )

    def tell(self, kind: str, **fields: Any) -> None:
        """Hand an event to the sinks. One that fails gets no more: it is no reason to end a run."""
        for sink in [*self.sinks]:
            try:
                sink.write({"kind": kind, **fields})
            except Exception as error:
                self.sinks.remove(sink)
                log.error("%s failed, and gets no more of this run: %s", type(sink).__name__, in_one_line(error))

    def close_sinks(self) -> None:
        """The run is over."""
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as error:
                log.error("%s could not be closed: %s", type(sink).__name__, in_one_line(error))
        self.sinks.clear()

    def effects_before(self, number: int) -> dict[str, Any]:
        """Return the effects as they were noted when an incident was opened."""
        history = RunHistory()
        for entry in self._journal.entries if self._journal is not None else ():
            with suppress(ValueError):  # about an incident that cannot be read
                history.recall(entry)
            if number in history.by_id:
                break
        return history.effects

    def note_process_end(self, tick: int, start: int, stop: int) -> int:
        """Note which samples were in use when a process ended; return how many processes in a row ended at these."""
        self.note("process_ended", tick=tick, start=start, stop=stop)
        return len(list(takewhile(lambda one: one == (start, stop), reversed(self._endings))))

    # From opening to outcome.

    def open(
        self, anomaly: Anomaly, diagnosis: Diagnosis, decision: Decision, *, effects: _Effects = None, **done: Any
    ) -> Incident:
        """Add an incident before anything is done about it; open incidents of the same kind have recurred.

        If the decision is to give up, all have failed. `done` are its fields that say what was done already.
        """
        number, kind, gives_up = self.next_id, kind_of(anomaly.signal, diagnosis), decision.gave_up is not None
        for one in self.open_incidents:
            is_same_kind = one.kind == kind
            if is_same_kind and one.is_interrupted and anomaly.step == one.anomaly.step:
                number = one.id  # here it is again
            elif is_same_kind:
                self.close(one, Outcome.RECURRED)
            elif gives_up:
                self.close(one, Outcome.GAVE_UP)
        outcome = Outcome.GAVE_UP if gives_up else None
        incident = Incident(number, anomaly, diagnosis, decision, outcome=outcome, **done)
        self.add(incident, effects)
        return incident

    def add(self, incident: Incident, effects: _Effects = None) -> None:
        self.note(OPENED, incident=incident, effects=effects)

    def record_treatment(self, incident: Incident, *, effects: _Effects = None) -> None:
        """Record what was done about an incident."""
        self.note(TREATED, incident=incident, effects=effects)
        log.warning("%s", describe(incident))

    def update(self, incident: Incident) -> None:
        self.note(TREATED, incident=incident)

    def close(self, incident: Incident, outcome: Outcome | None = None) -> None:
        """Record the outcome of an incident, by default the one it has, and list it."""
        outcome = Outcome.OBSERVED if incident.is_observed else outcome
        incident = replace(incident, outcome=outcome or incident.outcome)
        assert incident.outcome is not None, f"incident {incident.id} has no outcome yet"
        self.note(CLOSED, incident=incident)
        if self._list is not None:
            self._list.waiting.append(_line(incident))
            self._list.flush(sync=False)
        # One that recurred is reported by the incident that came after it.
        if incident.outcome in (Outcome.RECOVERED, Outcome.OBSERVED):
            log.info("%s", describe(incident, "outcome"))

    def note_effects(self, *, effects: Mapping[str, Any]) -> None:
        """Note which effects have changed, where no incident is noted with them."""
        self.note("effects_changed", effects=effects)

    def update_accepted(self, step: int, recovered_after: int, *, loss_is_off: bool) -> None:
        """Close what has recovered; while `loss_is_off` its reference, incidents that left damage stay open."""
        for one in self.open_incidents:
            reached = one.last_step - (not one.anomaly.landed)
            is_over = step >= reached + recovered_after and one.anomaly.signal not in _OF_SAVING
            if is_over and not (loss_is_off and one.left_damage):
                self.close(one, Outcome.RECOVERED)

    # An incident that is only observed counts the anomalous updates that follow, as NaN makes only one.

    @property
    def is_observing(self) -> bool:
        return any(one.is_observed for one in self.open_incidents)

    def counts_on(self, tick: int, step: int) -> bool:
        """Count an anomalous update, the newest, into the incident; False if there is none."""
        incident = next((one for one in self.open_incidents if one.is_observed), None)
        if incident is not None and step > incident.last_step:
            self.adopt(replace(incident, further=incident.further + 1, again=((tick, step),)))
        return incident is not None

    def continued(self, signal: Signal, diagnosis: Diagnosis, decision: Decision) -> Incident | None:
        """Return the newest incident if it is open, and the same happened again and is only skipped again.

        The same operation broke, or nothing is known of either update but the same signal. Other ranks decide alike:
        incidents of a process, which they may not know of, do not come between.
        """
        is_unknown = diagnosis.cause is Cause.UNKNOWN and not diagnosis.rows and signal is not Signal.EXCEPTION
        is_same_kind = diagnosis.culprit is not None or is_unknown
        is_skip = decision.actions == (Action("skip"),) and is_same_kind
        if not is_skip or not (earlier := self.of_training):
            return None
        last = earlier[-1]
        is_same = last.decision == decision and last.kind == kind_of(signal, diagnosis)
        return last if is_same and last.outcome is None and len(last.again) < _AGAIN else None

    def count_again(self, incident: Incident, anomaly: Anomaly, *, effects: _Effects = None) -> None:
        """Count an update into the incident that it continues: strikes and budgets count it, also after a restart."""
        self.note(AGAIN, number=incident.id, at_update=[anomaly.tick, anomaly.step], effects=effects)

    def close_all(self, outcome: Outcome, *, healthy_since: int | None = None) -> None:
        """Close open incidents as the training ends: as recovered, or with `outcome` if they left damage.

        One that was skipped again has recurred, unless all of that was up to step `healthy_since`.
        """
        before = {one.kind: one.outcome for one in self.of_training if one.outcome}
        for one in self.open_incidents:
            reached = one.last_step - (not one.anomaly.landed)
            is_skip = one.decision.actions == (Action("skip"),)
            was = before.get(one.kind)
            is_again = bool(one.again) or (is_skip and was is Outcome.RECURRED)
            has_recurred = is_again and healthy_since is not None and reached > healthy_since
            if one.anomaly.signal not in _OF_SAVING:
                over = Outcome.RECURRED if has_recurred else Outcome.RECOVERED
                self.close(one, outcome if one.left_damage else over)

    def close_saving(self, outcome: Outcome) -> None:
        """Close incidents about checkpoints that could not be saved."""
        for one in self.open_incidents:
            if one.anomaly.signal in _OF_SAVING:
                self.close(one, outcome)

    def close_files(self) -> None:
        if self._list is not None and self._list.waiting:
            self._list.flush(sync=False)
        if self._journal is not None:
            self._journal.close()


def _line(incident: Incident) -> bytes:
    return json.dumps(in_words(incident)).encode() + b"\n"
