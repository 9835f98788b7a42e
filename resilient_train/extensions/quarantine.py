"""quarantine.json: the rows that a run took out of its data, and why. It is only written: the journal has them, too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from resilient_train.core.controls import Effect
from resilient_train.data.samples import Samples
from resilient_train.durable.journal import WriteAttempts, commit_json
from resilient_train.ground.secrets import masked_tree
from resilient_train.ground.types import Facts
from resilient_train.ground.wording import say

QUARANTINE = "quarantine.json"  # its name in a run directory

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Quarantined:
    reason: Facts  # the file has it in words
    step: int
    incident: int  # its number, in the run that met it


class Quarantine:
    """The rows that others stand in for, and the file that lists them; without a run directory there is no file."""

    def __init__(self, directory: Path | None, samples: Samples, fingerprint: Callable[[], Mapping[str, Any]]) -> None:
        """The fingerprint of the data set costs fetching some rows."""
        self._file = None if directory is None else directory / QUARANTINE
        self._samples, self._fingerprint = samples, functools.cache(fingerprint)
        self.rows: dict[int, Quarantined] = {}  # by their indices, in the order in which they were added
        self._is_behind = False  # the file
        self._attempts = WriteAttempts(self._file, "this is retried with the next row")

    def add(self, reasons: Mapping[int, Facts], step: int, incident: int) -> None:
        """Take rows out of the data; `write` follows. A row that is listed already keeps its reason."""
        self._samples.quarantine(reasons)
        for row, why in reasons.items():
            self.rows.setdefault(row, Quarantined(tuple(masked_tree([*why])), step, incident))
        self._is_behind |= bool(reasons)

    def write(self) -> None:
        is_due, self._is_behind = self._is_behind or self._attempts.has_failed, False
        if self._file is None or not is_due:
            return
        rows = [{"row": row, **asdict(why), "reason": say(why.reason)} for row, why in self.rows.items()]
        with self._attempts.attempt():
            commit_json(self._file, {"format": _FORMAT, "data": self._fingerprint(), "rows": rows})

    def effect(self) -> Effect:
        def state() -> list[list[Any]]:
            return [[row, [*why.reason], why.step, why.incident] for row, why in self.rows.items()]

        return Effect("quarantined", state, self._restore, agreed=lambda: sorted(self.rows))

    def _restore(self, state: Any) -> None:
        there = range(self._samples.rows)  # the data set may be smaller now
        for row, reason, step, incident in state:
            if int(row) in there:
                self.add({int(row): tuple(reason)}, int(step), int(incident))
        self.write()
