"""What has happened in a run: the one reader of its journal, for the run itself and for all that look at it."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from resilient_train.durable.journal import JOURNAL, Entry, plain, read
from resilient_train.ground.reader import hints
from resilient_train.ground.secrets import masked_tree
from resilient_train.ground.types import Incident
from resilient_train.ground.wording import known_of, say

OPENED, TREATED, CLOSED = "incident_opened", "incident_treated", "incident_closed"  # kinds of entries
AGAIN = "incident_again"  # an update more that an incident counts


class RunHistory:
    """Folds the entries of a journal."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.by_id: dict[int, Incident] = {}
        self.open_by_id: dict[int, Incident] = {}  # those without an outcome
        self.treated: set[int] = set()  # the numbers of those about which something was done
        self.effects: dict[str, Any] = {}  # of remedies, as they were noted last
        self.has_saved = False  # a checkpoint was ever committed
        self.sources: set[str] = set()  # paths that the user told the run to resume from
        self.data_rows: int | None = None  # of the data set when the run began
        self._endings: list[tuple[int, int]] = []  # the samples in use when a process ended
        for entry in entries:
            with suppress(ValueError):  # about an incident of another version
                self.recall(entry)
        self.by_id = dict(sorted(self.by_id.items()))

    @property
    def incidents(self) -> list[Incident]:
        return list(self.by_id.values())

    def recall(self, entry: Entry) -> None:
        """Take in an entry. Raises ValueError if it is about an incident that cannot be read."""
        if "effects" in entry:  # in an entry of their own, or of an incident
            self._add(**entry["effects"])
        match entry["kind"]:
            case "incident_opened" | "incident_treated" | "incident_closed" as kind:
                tree = entry["incident"]
                incident = tree if isinstance(tree, Incident) else from_tree(tree)
                if kind == TREATED:
                    self.treated.add(incident.id)
                known = self.by_id.get(incident.id)
                self.adopt(replace(incident, at=known.at if known is not None else entry["at"]))
            case "incident_again":
                if (known := self.by_id.get(entry["number"])) is not None:
                    again = (*known.again, tuple(entry["at_update"]))
                    self.adopt(replace(known, again=again, further=len(again)))
            case "checkpoint_saved":
                self.has_saved = True
            case "process_ended":
                self._endings.append((entry["start"], entry["stop"]))
            case "data_seen":
                self.data_rows = entry["rows"]
            case "taken_up_from":
                self.sources.add(entry["source"])

    def _add(self, added: Mapping[str, list[Any]], **whole: Any) -> None:
        """Add what `Effects.changes` returned."""
        self.effects |= {name: [*one] if isinstance(one, list) else one for name, one in whole.items()}
        for name, new in added.items():  # in place: copying a list each time would take longer with each incident
            self.effects.setdefault(name, []).extend(new)

    def effects_with(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the effects in force: those that were `saved` with a checkpoint, or noted since."""
        known = [saved, self.effects]  # at the same tick the journal's are newer
        older, newer = sorted(known, key=lambda one: one.get("tick", 0))
        return {**older, **newer}

    def adopt(self, *incidents: Incident) -> None:
        """Take in what happened to incidents without noting it: a rank without a journal takes those of rank 0."""
        for one in incidents:
            self.by_id[one.id] = one
            if one.outcome is None:
                self.open_by_id[one.id] = one
            else:
                self.open_by_id.pop(one.id, None)


def history_of(run_dir: Path) -> RunHistory:
    """Read what a run has noted; nothing of a journal that cannot be read."""
    with suppress(OSError):
        return RunHistory(read(run_dir / JOURNAL))
    return RunHistory()


# Of a line: first the documented ones.
_KEYS = (
    "id step tick rank signal cause culprit rows advice actions rewound_to steps_lost seconds outcome "
    "evidence ranks symptom since landed rung gave_up"
)


def in_words(incident: Incident) -> dict[str, Any]:
    """Return an incident as incidents.jsonl has it: with sentences in place of facts."""
    known, why = known_of(incident), incident.decision.gave_up
    known |= {
        "rank": min(known["ranks"], default=None),  # null: it began on all of them at once
        **{name: known[name] and asdict(known[name]) for name in ("culprit", "symptom")},
        "actions": [{"remedy": one.remedy, **one.settings} for one in incident.decision.actions],
        "tried": [*map(asdict, incident.tried)],
        "advice": say(incident.diagnosis.advice),
        "evidence": say(incident.anomaly.evidence, "; "),
        "gave_up": None if why is None else say(why),
    }
    keys = _KEYS.split()
    if incident.is_observed or incident.further:
        keys += ["further", "again"]
    keys += [name for name in ("suspects", "tried") if known[name]]
    return masked_tree(plain({name: known[name] for name in keys}))  # type: ignore[no-any-return]


def from_tree(tree: Any) -> Incident:
    """Return the incident that the journal has as a tree. Raises ValueError if it cannot be read."""
    try:
        return _record(Incident, tree)  # type: ignore[no-any-return]
    except (KeyError, TypeError) as error:
        raise ValueError(f"an incident cannot be read: {error}") from None


def _record(kind: Any, tree: Mapping[str, Any]) -> Any:
    """Build a record from a tree by the types of its fields; unknown keys are ignored."""
    return kind(**{name: _value(hints(kind)[name], tree[name]) for name in kind.__slots__ if name in tree})


def _value(kind: Any, value: Any) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _value(inner[0], value)
    if origin is tuple:
        return tuple(_value(inner[0], one) for one in value)
    if is_dataclass(kind):
        return _record(kind, value)
    is_read = kind is float or (isinstance(kind, type) and issubclass(kind, StrEnum))  # a number may be text: inf
    return kind(value) if is_read else value
