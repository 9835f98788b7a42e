"""What has happened in a run: the one reader of its journal, for the run itself and for all that look at it."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from resilient_train.durable.journal import JOURNAL, Entry, plain, read
from resilient_train.ground.reader import hints
from resilient_train.ground.secrets import masked_tree
from resilient_train.ground.types import Action, Anomaly, Decision, Diagnosis, Facts, Incident, fact
from resilient_train.ground.wording import known_of, say

OPENED, TREATED, CLOSED = "incident_opened", "incident_treated", "incident_closed"  # kinds of entries
AGAIN = "incident_again"  # an update more that an incident counts


@dataclass(frozen=True, slots=True)
class Chapter:
    incident: Incident
    opened_ms: int  # since 1970
    treated_ms: int | None = None  # None while something is being done about it
    closed_ms: int | None = None  # None until the outcome is known


class RunHistory:
    """Folds the entries of a journal."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.chapters: dict[int, Chapter] = {}  # by the number of the incident
        self.open_by_id: dict[int, Incident] = {}  # those without an outcome
        self.effects: dict[str, Any] = {}  # of remedies, as they were noted last
        self.has_saved = False  # a checkpoint was ever committed
        self.sources: set[str] = set()  # paths that the user told the run to resume from
        self.data_rows: int | None = None  # of the data set when the run began
        self.drills: dict[int, Facts] = {}  # that have fired, by their numbers
        # By tick, which no two processes end at: the samples in use when one ended.
        self._endings: dict[int, tuple[int, int]] = {}
        for entry in entries:
            with suppress(ValueError):  # about an incident of another version
                self.recall(entry)
        self.chapters = dict(sorted(self.chapters.items()))

    @property
    def incidents(self) -> list[Incident]:
        return [chapter.incident for chapter in self.chapters.values()]

    def recall(self, entry: Entry) -> None:
        """Take in an entry. Raises ValueError if it is about an incident that cannot be read."""
        if isinstance(effects := entry.get("effects"), dict):  # in an entry of their own, or of an incident
            self._add(**effects)
        match entry:
            case {"kind": "incident_opened" | "incident_treated" | "incident_closed" as kind, "at": int(at)}:
                self._recall_incident(kind, entry.get("incident"), at)
            case {"kind": "incident_again", "number": int(number), "at_update": [int(tick), int(step)]}:
                if (known := self.chapters.get(number)) is not None:
                    again = (*known.incident.again, (tick, step))
                    self._keep(replace(known, incident=replace(known.incident, again=again, further=len(again))))
            case {"kind": "checkpoint_saved"}:
                self.has_saved = True
            case {"kind": "process_ended", "tick": int(tick), "start": int(start), "stop": int(stop)}:
                self._endings[tick] = (start, stop)
            case {"kind": "data_seen", "rows": int(rows)}:
                self.data_rows = rows
            case {"kind": "taken_up_from", "source": str(source)}:
                self.sources.add(source)
            case {"kind": "drill_fired", "drill": int(number), "name": str(fault), "tick": int(tick)}:
                self.drills[number] = fact("fired", name=fault, tick=tick)

    def _add(self, added: Mapping[str, list[Any]], **whole: Any) -> None:
        """Add what `Effects.changes` returned."""
        self.effects |= {name: [*one] if isinstance(one, list) else one for name, one in whole.items()}
        for name, new in added.items():  # in place: copying a list each time would take longer with each incident
            self.effects.setdefault(name, []).extend(new)

    def effects_with(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the effects in force: those that were `saved` with a checkpoint, or noted since."""
        known = [saved, self.effects]  # at the same tick the journal's are newer
        older, newer = sorted(known, key=lambda one: tick if type(tick := one.get("tick")) is int else 0)
        return {**older, **newer}

    def _recall_incident(self, kind: str, line: Any, at: int) -> None:
        incident = line if isinstance(line, Incident) else from_line(line)
        chapter = replace(self.chapters.get(incident.id, Chapter(incident, at)), incident=incident)
        if kind == TREATED and chapter.treated_ms is None:  # a second entry only adds what is known since
            chapter = replace(chapter, treated_ms=at)
        elif kind == CLOSED:
            chapter = replace(chapter, closed_ms=at)
        self._keep(chapter)

    def _keep(self, chapter: Chapter) -> None:
        incident = chapter.incident
        self.chapters[incident.id] = chapter
        if incident.outcome is None:
            self.open_by_id[incident.id] = incident
        else:
            self.open_by_id.pop(incident.id, None)

    def adopt(self, incidents: Iterable[Incident]) -> None:
        """Take in what happened to incidents without noting it: a rank without a journal takes those of rank 0."""
        for one in incidents:
            self._keep(replace(self.chapters.get(one.id, Chapter(one, 0)), incident=one))


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


def as_line(incident: Incident) -> dict[str, Any]:
    """Return an incident as incidents.jsonl and the journal hold it."""
    known = known_of(incident)
    known |= {
        "rank": min(known["ranks"], default=None),  # null: it began on all of them at once
        **{name: known[name] and asdict(known[name]) for name in ("culprit", "symptom")},
        "actions": [*map(_line_of_action, known["actions"])],
        "tried": [*map(asdict, incident.tried)],
    }
    keys = _KEYS.split()
    if incident.is_observed or incident.further:
        keys += ["further", "again"]
    keys += [name for name in ("suspects", "tried") if known[name]]
    return masked_tree(plain({name: known[name] for name in keys}))  # type: ignore[no-any-return]


def in_words(incident: Incident) -> dict[str, Any]:
    """Return its line with sentences in place of facts, as incidents.jsonl has it."""
    why, line = incident.decision.gave_up, as_line(incident)
    line |= {"advice": say(incident.diagnosis.advice), "evidence": say(incident.anomaly.evidence, "; ")}
    line["gave_up"] = say(why) if why is not None else None
    return masked_tree(line)  # type: ignore[no-any-return]


def from_line(line: Any) -> Incident:
    """Return the incident of a line. Raises ValueError if it cannot be read; unknown keys are ignored."""
    try:
        parts = {"anomaly": _record(Anomaly, line), "decision": _record(Decision, line)}
        parts["diagnosis"] = _record(Diagnosis, {**line, "ranks": []})  # `ranks` are those of the anomaly
        return _record(Incident, line, **parts)  # type: ignore[no-any-return]
    except (KeyError, TypeError) as error:
        raise ValueError(f"an incident cannot be read: {error}") from None


def _line_of_action(action: Action) -> dict[str, Any]:
    return {"remedy": action.remedy, **action.settings}


def _record(kind: Any, line: Mapping[str, Any], **parts: Any) -> Any:
    """Build a record from `parts` and, by the types of its other fields, from a line."""
    names = [name for name in kind.__slots__ if name not in parts and name in line]
    return kind(**parts, **{name: _value(hints(kind)[name], line[name]) for name in names})


def _value(kind: Any, value: Any) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _value(inner[0], value)
    if origin is tuple:
        return tuple(_value(inner[0], one) for one in value)
    if kind is Action:
        return _action(value)
    if origin is Mapping and not isinstance(value, dict):
        raise TypeError(f"{value!r} is no fact")
    if is_dataclass(kind):
        return _record(kind, value)
    is_read = kind is float or (isinstance(kind, type) and issubclass(kind, StrEnum))  # a number may be text: inf
    return kind(value) if is_read else value


def _action(line: Mapping[str, Any]) -> Action:
    return Action(line["remedy"], {key: value for key, value in line.items() if key != "remedy"})
