"""quarantine.json: the rows that a run has taken out of its data, and why."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from resilient_train.errors import ConfigError, unusable
from resilient_train.files import commit_text, read_json, read_plain
from resilient_train.secrets import masked_tree

QUARANTINE = "quarantine.json"  # its name in a run directory

_FORMAT = 1

_log = logging.getLogger("resilient_train")


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Why a row is in quarantine."""

    reason: str
    step: int
    incident: int  # its number, in the run that met it


class Quarantine:
    """The rows in quarantine, and the file that lists them; on ranks without the run directory only in memory."""

    def __init__(
        self, directory: Path | None, fingerprint: Callable[[], Mapping[str, Any]], *, data_may_differ: bool = False
    ) -> None:
        """Recall what the directory lists. Raises ConfigError where those are rows of another data set.

        Unless they may differ: then the rows keep their numbers, as far as there are as many.

        The fingerprint is asked for only where there is something to list: it costs fetching some rows.
        """
        self._file = None if directory is None else directory / QUARANTINE
        self._fingerprint = functools.cache(fingerprint)
        self._rows: dict[int, Quarantined] = {}
        self.given = 0  # of the rows were another run's
        self._is_behind = False  # the file, because it could not be written
        if self._file is not None and self._file.exists():
            self._recall(self._file, data_may_differ=data_may_differ)

    @property
    def rows(self) -> Mapping[int, Quarantined]:
        """The rows by their indices, in the order in which they were added."""
        return MappingProxyType(self._rows)

    def add(self, rows: Iterable[int], reason: str, step: int, incident: int) -> None:
        """List rows, and write the list. One that is listed already stays as it is."""
        self.adopt({row: Quarantined(reason, step, incident) for row in rows})

    def adopt(self, rows: Mapping[int, Quarantined]) -> None:
        """List rows as another rank, the journal or another run knows them."""
        new = {row: why for row, why in rows.items() if row not in self._rows}
        self._rows |= new
        if new or self._is_behind:
            self._write()

    def load(self, path: Path, key: str = "quarantine") -> None:
        """Adopt the list of another run. Raises ConfigError where it is damaged, or of another data set."""
        try:
            rows = _read(path, self._fingerprint())
        except OSError as error:
            raise ConfigError(key, path, f"cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(key, path, str(error)) from error
        before = len(self._rows)
        self.adopt(rows)
        self.given += len(self._rows) - before

    def _recall(self, file: Path, *, data_may_differ: bool) -> None:
        """Read the run's own list; a damaged one does not stop the run."""
        here = self._fingerprint()
        try:
            listed = _read(file, None if data_may_differ else here)
            self._rows = {row: why for row, why in listed.items() if row < here["rows"]}
            if data_may_differ:
                self._write()
        except Foreign as error:
            why = f"{error}; give the run its own data, or take it as it is (data_changed=accept)"
            raise unusable(str(file), why) from error
        except (OSError, ValueError) as error:
            _log.error("%s cannot be used and is renamed: %s", file, error)
            with contextlib.suppress(OSError):
                file.replace(file.with_name(f"{file.name}.damaged"))

    def _write(self) -> None:
        if self._file is None:
            return
        rows = masked_tree([{"row": row, **asdict(why)} for row, why in self._rows.items()])
        content = {"format": _FORMAT, "data": dict(self._fingerprint()), "rows": rows}
        content["sha256"] = _digest(content)
        try:
            commit_text(self._file, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            if not self._is_behind:
                _log.error("%s could not be written, and is tried again with the next row: %s", self._file, error)
            self._is_behind = True
        else:
            self._is_behind = False


def reasons(run_dir: Path) -> dict[int, str]:
    """Return the rows in quarantine, and why, for a person to read; of what is damaged, nothing."""
    content = read_json(run_dir / QUARANTINE)
    rows = content.get("rows") if isinstance(content, dict) else None
    listed = [one for one in rows if isinstance(one, dict)] if isinstance(rows, list) else []
    return {one["row"]: str(one.get("reason", "")) for one in listed if type(one.get("row")) is int}


class Foreign(ValueError):
    """A list of rows of another data set."""


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read(file: Path, fingerprint: Mapping[str, Any] | None) -> dict[int, Quarantined]:
    """Read a list of rows of this data set. Raises ValueError where anything in it is not what it should be."""
    try:
        content = json.loads(read_plain(file).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError("is damaged: it is not JSON") from error
    form = content.get("format") if isinstance(content, dict) else None
    if type(form) is int and form != _FORMAT:
        raise ValueError(f"is of format {form}, where this version reads {_FORMAT}")
    # Lists of earlier versions have none, nor has one whose reader took it out to edit the rest.
    if isinstance(content, dict) and "sha256" in content and content.pop("sha256") != _digest(content):
        raise ValueError("is damaged: it is not what was written (its sha256 is that of another list)")
    if not _fits(content, {"format": int, "data": dict, "rows": list}) or not _is_fingerprint(content["data"]):
        raise ValueError("is damaged: it is no list of rows in quarantine")
    wanted = {"row": int, "reason": str, "step": int, "incident": int}
    count = content["data"]["rows"]
    for entry in content["rows"]:
        if not _fits(entry, wanted) or not 0 <= entry["row"] < count:
            raise ValueError(f"is damaged: {json.dumps(entry)[:100]} is no row in quarantine")
    if fingerprint is not None and (why := _other(content["data"], fingerprint)):
        raise Foreign(why)
    return {entry.pop("row"): Quarantined(**entry) for entry in content["rows"]}


def _fits(node: Any, wanted: Mapping[str, type]) -> bool:
    """Say whether a node has just these keys, with values of just these types: True is no whole number."""
    return isinstance(node, dict) and {key: type(value) for key, value in node.items()} == wanted


def _is_fingerprint(node: dict[str, Any]) -> bool:
    digests = node.get("digests")
    return _fits(node, {"dataset": str, "rows": int, "digests": dict}) and all(
        digest is None or isinstance(digest, str) for digest in (digests or {}).values()
    )


def _other(listed: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Say how the data set of a list differs from this one; rows that differ at each fetch prove nothing."""
    theirs, ours = (f"{one['dataset']} ({one['rows']:,} rows)" for one in (listed, here))
    if theirs != ours:
        return f"lists rows of {theirs}, and this data set is {ours}"
    known, now = listed["digests"], here["digests"]
    changed = [row for row in known.keys() & now.keys() if known[row] and now[row] and known[row] != now[row]]
    if changed:
        return f"lists rows of other data: row {min(changed, key=int)} of {ours} is not what it was"
    return None
