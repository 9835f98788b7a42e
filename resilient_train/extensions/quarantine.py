"""Rows that others stand in for, for the rest of the run, and quarantine.json, which lists them and says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from resilient_train.core.controls import Controls
from resilient_train.core.protocols import Effect
from resilient_train.core.remedies import Case, Remedy
from resilient_train.durable.journal import WriteAttempts, commit_json
from resilient_train.extensions import Extension
from resilient_train.ground.secrets import masked_tree
from resilient_train.ground.types import Facts, Incident
from resilient_train.ground.wording import say
from resilient_train.parts.run import Run

QUARANTINE = "quarantine.json"  # its name in a run directory

_FORMAT = 1


@dataclass(frozen=True)
class QuarantineRows(Remedy):
    """Replace the bad rows for the rest of the run, and retry the update with the replacements."""

    order, is_mild = 20, True

    def applies(self, case: Case) -> bool:
        """Rows must be known by an index; updates with them that landed must be undone as well."""
        return bool(case.diagnosis.rows) and case.rows > 0 and (not case.anomaly.landed or case.rewinds)

    def apply(self, run: Controls) -> None:
        run.extension(RowsLeftOut).quarantine(run.incident)


class RowsLeftOut(Extension):
    remedies = MappingProxyType({"quarantine": QuarantineRows})

    def build(self, run: Run) -> None:
        self._run = run
        # By their indices, in the order in which they were added: the reason, and step and number of the incident.
        self.rows: dict[int, tuple[Facts, int, int]] = {}
        directory = run.incident_log.directory  # without one there is no file
        self._file = None if directory is None else directory / QUARANTINE
        self._attempts = WriteAttempts(self._file, "this is retried with the next row")
        agreed = partial(sorted, self.rows)
        run.effects.append(Effect("quarantined", self._state, self._restore, agreed=agreed, noted=self.write))

    def quarantine(self, incident: Incident) -> None:
        diagnosis = incident.diagnosis
        reasons = {row: diagnosis.reasons.get(row, diagnosis.advice) for row in diagnosis.rows}
        self.add(reasons, incident.anomaly.step, incident.id)

    def add(self, reasons: Mapping[int, Facts], step: int, incident: int) -> None:
        """Take rows out of the data. They are in the file once the journal has them. A row keeps its first reason."""
        self._run.samples.quarantine(reasons)
        for row, why in reasons.items():
            self.rows.setdefault(row, (tuple(masked_tree([*why])), step, incident))

    def write(self) -> None:
        if self._file is None or not self.rows:
            return
        rows = [
            {"row": row, "reason": say(reason), "step": step, "incident": incident}
            for row, (reason, step, incident) in self.rows.items()
        ]
        dataset = self._run.samples.dataset  # type: ignore[attr-defined]
        data = {"dataset": type(dataset).__name__, "rows": len(dataset)}
        with self._attempts.attempt():
            commit_json(self._file, {"format": _FORMAT, "data": data, "rows": rows})

    def _state(self) -> list[list[Any]]:
        return [[row, [*reason], step, incident] for row, (reason, step, incident) in self.rows.items()]

    def _restore(self, state: Any) -> None:
        there = range(self._run.samples.rows)  # the data set may be smaller now
        for row, reason, step, incident in state:
            if int(row) in there:
                self.add({int(row): tuple(reason)}, int(step), int(incident))
        self.write()
