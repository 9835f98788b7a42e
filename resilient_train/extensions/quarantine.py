"""quarantine.json: the rows that a run took out of its data, and why. It is only written: the journal has them, too."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from resilient_train.durable.journal import WriteAttempts
from resilient_train.ground.files import commit_text
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
    """The rows in quarantine, and the file that lists them. Without a run directory they are in memory only."""

    def __init__(self, directory: Path | None, fingerprint: Callable[[], Mapping[str, Any]]) -> None:
        """The fingerprint of the data set costs fetching some rows."""
        self._file = None if directory is None else directory / QUARANTINE
        self._fingerprint = functools.cache(fingerprint)
        self.rows: dict[int, Quarantined] = {}  # by their indices, in the order in which they were added
        self._is_behind = False  # the file
        self._attempts = WriteAttempts(self._file, "this is retried with the next row")

    def add(self, rows: Mapping[int, Quarantined]) -> None:
        """List rows with their reasons; `write` follows. A row that is listed already keeps its reason."""
        new = {row: why for row, why in rows.items() if row not in self.rows}
        self.rows |= new
        self._is_behind |= bool(new)

    def write(self) -> None:
        is_due, self._is_behind = self._is_behind or self._attempts.has_failed, False
        if self._file is None or not is_due:
            return
        rows = masked_tree([{"row": row, **asdict(why), "reason": say(why.reason)} for row, why in self.rows.items()])
        content = {"format": _FORMAT, "data": dict(self._fingerprint()), "rows": rows}
        with self._attempts.attempt():
            commit_text(self._file, json.dumps(content, indent=2) + "\n")
