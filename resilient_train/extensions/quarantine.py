"""quarantine.json: the rows that a run took out of its data, and why."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from resilient_train.core.protocols import Effect, Extension
from resilient_train.core.remedies import Case, Remedy, RunControl
from resilient_train.data.rows import fingerprint
from resilient_train.durable.journal import WriteAttempts
from resilient_train.ground.errors import unusable
from resilient_train.ground.files import commit_text, digest_of, read_plain
from resilient_train.ground.secrets import masked_tree
from resilient_train.ground.types import Facts, Incident, fact
from resilient_train.ground.wording import log, say
from resilient_train.parts.run import Run

QUARANTINE = "quarantine.json"  # its name in a run directory

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Quarantined:
    reason: Facts  # the file has it in words
    step: int
    incident: int  # its number, in the run that met it


class Quarantine:
    """The rows in quarantine, and the file that lists them. Without a run directory they are in memory only."""

    def __init__(
        self, directory: Path | None, fingerprint: Callable[[], Mapping[str, Any]], *, data_may_differ: bool = False
    ) -> None:
        """Read the list of the directory. Raises ConfigError if it is of another data set.

        If `data_may_differ` the rows keep their numbers instead. The fingerprint costs fetching some rows.
        """
        self._file = None if directory is None else directory / QUARANTINE
        self._fingerprint = functools.cache(fingerprint)
        self.rows: dict[int, Quarantined] = {}  # by their indices, in the order in which they were added
        self._is_behind = False  # the file
        self._attempts = WriteAttempts(self._file, "this is retried with the next row")
        if self._file is not None and self._file.exists():
            self._recall(self._file, data_may_differ=data_may_differ)

    def add(self, rows: Mapping[int, Quarantined]) -> None:
        """List rows with their reasons; `write` follows. A row that is listed already keeps its reason."""
        new = {row: why for row, why in rows.items() if row not in self.rows}
        self.rows |= new
        self._is_behind |= bool(new)

    def _recall(self, file: Path, *, data_may_differ: bool) -> None:
        """Read the list of this run; a damaged one does not stop the run."""
        here = self._fingerprint()
        try:
            listed = _read(file, None if data_may_differ else here)
            self.rows |= {row: why for row, why in listed.items() if row < here["rows"]}
            if data_may_differ:
                self._is_behind = True
                self.write()
        except Foreign as error:
            why = f"{error}; give the run its own data, or take it as it is (data_changed=accept)"
            raise unusable(str(file), why) from error
        except (OSError, ValueError) as error:
            log.error("%s cannot be used and is renamed: %s", file, error)
            with contextlib.suppress(OSError):
                file.replace(file.with_name(f"{file.name}.damaged"))

    def write(self) -> None:
        is_due, self._is_behind = self._is_behind or self._attempts.has_failed, False
        if self._file is None or not is_due:
            return
        rows = masked_tree([{"row": row, **asdict(why), "reason": say(why.reason)} for row, why in self.rows.items()])
        content = {"format": _FORMAT, "data": dict(self._fingerprint()), "rows": rows}
        content["sha256"] = digest_of(content)
        with self._attempts.attempt():
            commit_text(self._file, json.dumps(content, indent=2) + "\n")


class Foreign(ValueError):
    """A list of rows of another data set."""


def _read(file: Path, here: Mapping[str, Any] | None) -> dict[int, Quarantined]:
    """Read a list of rows. Raises Foreign if they are not of the data set `here`, ValueError if it is damaged."""
    try:
        content = json.loads(read_plain(file).decode("utf-8"))
        if (form := content["format"]) != _FORMAT:
            raise ValueError(f"is of format {form}, where this version reads {_FORMAT}")
        if content.pop("sha256", None) not in (None, digest_of(content)):  # a user who edits the list removes it
            raise ValueError("is damaged: it is not what was written (its sha256 is that of another list)")
        rows = {
            one["row"]: Quarantined(fact("text", text=one["reason"]), one["step"], one["incident"])
            for one in content["rows"]
        }
        if not all(type(row) is int and 0 <= row < content["data"]["rows"] for row in rows):
            raise ValueError("is damaged: it lists what is no row of the data set")
        if here is not None:
            _compare(content["data"], here)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("is damaged: it is not a list of rows in quarantine") from error
    return rows


def _compare(listed: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise Foreign if the data set of a list is not this one. Rows that differ at each fetch prove nothing."""
    theirs, ours = (f"{one['dataset']} ({one['rows']:,} rows)" for one in (listed, here))
    if theirs != ours:
        raise Foreign(f"lists rows of {theirs}, but this data set is {ours}")
    for row, now in here["digests"].items():
        if now and (known := listed["digests"].get(row)) and known != now:
            raise Foreign(f"lists rows of other data: row {row} of {ours} has changed")


@dataclass(frozen=True)
class QuarantineRows(Remedy):
    """Replace the bad rows for the rest of the run, and retry the update with the replacements."""

    order, is_mild = 20, True

    def applies(self, case: Case) -> bool:
        """Rows must be known by an index; updates with them that landed must be undone as well."""
        return bool(case.diagnosis.rows) and case.rows > 0 and (not case.anomaly.landed or case.rewinds)

    def apply(self, run: RunControl) -> None:
        run.extension(RowsLeftOut).quarantine(run.incident)


class RowsLeftOut(Extension):
    """Rows that others stand in for, each with why, at which step and by which incident."""

    remedies = MappingProxyType({"quarantine": QuarantineRows})

    def build(self, run: Run) -> None:
        """Leave out the rows that the list of the run directory has. Raises ConfigError if it is of other data."""
        self._run, self._list = run, Quarantine(None, dict)
        run.leave_out = self.leave_out
        if run.samples.rows:
            rows = run.world.on_main(self._read)
            self._list.add(rows)
            run.samples.quarantine(rows)

        def state() -> list[list[Any]]:
            return [[row, [*why.reason], why.step, why.incident] for row, why in self._list.rows.items()]

        agreed = partial(sorted, self._list.rows)
        run.effects.append(Effect("quarantined", state, self._restore, agreed=agreed, noted=self._list.write))

    def _read(self) -> dict[int, Quarantined]:
        run, dataset = self._run, self._run.samples.dataset  # type: ignore[attr-defined]
        directory = run.incident_log.directory
        self._list = Quarantine(directory, lambda: fingerprint(dataset), data_may_differ=run.data_may_differ)
        return dict(self._list.rows)

    def quarantine(self, incident: Incident) -> None:
        diagnosis = incident.diagnosis
        reasons = {row: diagnosis.reasons.get(row, diagnosis.advice) for row in diagnosis.rows}
        self.add(reasons, incident.anomaly.step, incident.id)

    def add(self, reasons: Mapping[int, Facts], step: int, incident: int) -> None:
        """Take rows out of the data. They are listed in quarantine.json once the journal has them."""
        self._run.samples.quarantine(reasons)
        masked = {row: tuple(masked_tree([*why])) for row, why in reasons.items()}
        self._list.add({row: Quarantined(why, step, incident) for row, why in masked.items()})

    def leave_out(self, rows: Sequence[int], reason: Facts, incident: int) -> bool:
        """Leave out rows common to the updates in which the process died, if the budget allows."""
        count, listed = self._run.samples.rows, {*rows} | self._list.rows.keys()
        is_allowed = len(listed) <= min(self._run.policy.budget.rows_of(count), count - 1)
        if is_allowed:
            self.add(dict.fromkeys(rows, reason), self._run.clock.step, incident)
        return is_allowed

    def _restore(self, state: Any) -> None:
        """Rows that quarantine.json lost are listed there again; of the others it has the reasons in words only."""
        there = range(self._run.samples.rows)  # the data set may be smaller now
        for row, reason, step, incident in state:
            if (listed := int(row)) in there:
                self.add({listed: tuple(reason)}, int(step), int(incident))
                self._list.rows[listed] = Quarantined(tuple(reason), int(step), int(incident))
        self._list.write()
