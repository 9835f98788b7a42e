"""The incidents of a run: journalled as they unfold, and listed in incidents.jsonl once their outcome is known."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from resilient_train.files import commit_text, open_to_append, read_plain
from resilient_train.record.drills import FIRED, Strike, strikes
from resilient_train.record.journal import JOURNAL, Entry, Journal, plain
from resilient_train.record.surroundings import RESUME, Timed
from resilient_train.secrets import masked, masked_tree
from resilient_train.types import Action, Anomaly, Cause, Culprit, Decision, Diagnosis, Incident, Outcome, Signal
from resilient_train.wording import describe, describe_outcome, farewell, tags

__all__ = [
    "INCIDENTS",
    "IncidentBook",
    "as_line",
    "describe",
    "describe_outcome",
    "farewell",
    "from_line",
    "recalled",
    "tags",
]

INCIDENTS = "incidents.jsonl"  # its name in a run directory

_log = logging.getLogger("resilient_train")

OPENED, TREATED, CLOSED = "incident_opened", "incident_treated", "incident_closed"
IN_FORCE = "remedies_in_force"
PHASE = "incident_phase"  # a part of an incident that came after its entry: the run went on
_GOES_ON = {Signal.DISK_FULL, Signal.CHECKPOINT_FAILED}  # in spite of these training never stood still
_TAKEN_FROM = "taken_up_from"
_BEGAN, _MADE_OF, _MOST = "began", ("processes", "samples"), 2**40
_DATA = "data_seen"
_SAVED, _ENDED = "checkpoint_saved", "process_ended"


class IncidentBook:
    """Keeps the incidents of a run and the drills that fired; on ranks without the run directory only in memory."""

    def __init__(self, directory: Path | None, journal: Journal | None = None, *, place: Path | None = None) -> None:
        """Recall what the journal holds, by default that of the directory, and renew incidents.jsonl if it differs.

        `place` is the run directory, on ranks as well that keep no journal in it.
        """
        self.directory, self.place = directory, place or directory
        self._file = None if directory is None else directory / INCIDENTS
        self._journal = journal = None if directory is None else journal or Journal(directory / JOURNAL)
        self._incidents: dict[int, Incident] = {}
        self._lines: dict[int, str] = {}  # of incidents.jsonl, in the order of their outcomes
        self._drills: set[int] = set()
        self.struck: list[Strike] = []  # by drills
        self._about_drills: dict[int, Mapping[str, Any]] = {}
        self.remedies: Mapping[str, Any] | None = None  # in force
        self.has_saved = False  # a checkpoint, ever
        self.sources: set[str] = set()  # that the run was taken up from by name
        self.began_with: tuple[int, int] | None = None  # processes, and samples of an update
        self.data: Mapping[str, Any] | None = None  # what the data set is known by
        self._endings: list[tuple[int, int, bool]] = []  # samples at work when processes ended, in their first update
        self._were_treated: set[int] = set()
        self._stands_since: dict[int, int] = {}  # when incidents were treated that no update was accepted after, in ms
        for entry in journal.entries if journal else []:
            self._recall(entry)
        self._forget_intentions()
        self._is_current = self._holds(self._file)
        self._is_failing = False
        self._renew()

    @property
    def incidents(self) -> list[Incident]:
        """All incidents, open ones included, in the order they were met."""
        return [self._incidents[number] for number in sorted(self._incidents)]

    @property
    def next_id(self) -> int:
        """The number of the next incident."""
        return max(self._incidents, default=0) + 1

    def opened(self, incident: Incident) -> None:
        """Note an incident before anything is done about it."""
        self._note(OPENED, incident)

    def treated(self, incident: Incident, phases: Sequence[Timed] = ()) -> None:
        """Note what was done about an incident, and when; or, later and without phases, what more is known of it."""
        self._stands(incident, self._note(TREATED, incident, phases))

    def went_on(self) -> None:
        """Note that an update was accepted: the run goes on after what was treated before it."""
        if self._stands_since:
            now = time.time_ns() // 1_000_000
            for number, since in list(self._stands_since.items()):
                self.came_after(number, (RESUME, since, max(since, now)))

    def came_after(self, number: int, phase: Timed) -> None:
        """Note a part of an incident that was not over when its entry was written."""
        self._stands_since.pop(number, None)
        if self._journal is not None:
            self._journal.write(PHASE, number=number, phase=phase)

    def closed(self, incident: Incident, phases: Sequence[Timed] = ()) -> None:
        """Note the outcome of an incident, and list it. One that was never treated has its phases here."""
        assert incident.outcome is not None, f"incident {incident.id} has no outcome yet"
        self._note(CLOSED, incident, phases)
        self._stands_since.pop(incident.id, None)
        line = self._list(incident)
        if self._file is not None and self._is_current:
            try:
                with open(open_to_append(self._file), "a", encoding="utf-8") as file:
                    file.write(line)
            except OSError as error:
                self._fell_behind(error)
        else:
            self._renew()

    def about_drill(self, drill_number: int, more: Mapping[str, Any]) -> None:
        """Take what is to be noted of a drill that is about to fire."""
        self._about_drills[drill_number] = more

    def fired(self, drill_number: int, name: str, tick: int) -> None:
        """Note that a drill is about to fire: before it does, or a crash would fire again after every restart."""
        more = self._about_drills.pop(drill_number, {})
        entry = {"drill": drill_number, "name": name, "tick": tick, **more}
        self._drills.add(drill_number)
        self.struck += strikes([{"kind": FIRED, **entry}])
        if self._journal is not None:
            self._journal.write(FIRED, **entry)

    def in_force(self, remedies: Mapping[str, Any]) -> None:
        """Note what remedies are in force from now on."""
        self.remedies = remedies
        if self._journal is not None:
            self._journal.write(IN_FORCE, remedies=remedies)

    def saved(self, step: int, tick: int) -> None:
        """Note that a checkpoint was committed."""
        self.has_saved = True
        if self._journal is not None:
            self._journal.write(_SAVED, step=step, tick=tick)

    def ended(self, tick: int, start: int, stop: int, *, in_first: bool) -> int:
        """Note which samples were at work when the process ended; return how often in a row it was these.

        That is 0 as long as it was `in_first`, the first update after a start, each time: to compile takes long, and
        processes are killed meanwhile whatever the samples.
        """
        self._endings = [*self._endings, (start, stop, in_first)]
        if self._journal is not None:
            self._journal.write(_ENDED, tick=tick, start=start, stop=stop, in_first=in_first)
        same = list(takewhile(lambda one: one[:2] == (start, stop), reversed(self._endings)))
        return 0 if all(one[2] for one in same) else len(same)

    def began(self, processes: int, samples: int) -> None:
        """Note what an update is made of: should the run go on with more or fewer processes, that stays."""
        self.began_with = (processes, samples)
        if self._journal is not None:
            self._journal.write(_BEGAN, processes=processes, samples=samples)

    def knows_data(self, sample: Mapping[str, Any]) -> None:
        """Note what the data set is known by, for a process that resumes."""
        self.data = sample
        if self._journal is not None:
            self._journal.write(_DATA, sample=sample)

    def began_from(self, source: str) -> None:
        """Note that the run was taken up from a place that was named."""
        self.sources.add(masked(source))
        if self._journal is not None:
            self._journal.write(_TAKEN_FROM, source=source)

    def has_fired(self, drill_number: int) -> bool:
        """Say whether a drill fired already, in this process or one before it."""
        return drill_number in self._drills

    def close(self) -> None:
        """Try a last time what could not be written."""
        self._renew()
        if self._journal is not None:
            self._journal.close()

    def _note(self, kind: str, incident: Incident, phases: Sequence[Timed] = ()) -> Entry | None:
        self._incidents[incident.id] = incident
        if self._journal is None:
            return None
        when = {"phases": phases} if phases else {}
        return self._journal.write(kind, incident=as_line(incident), **when)

    def _stands(self, incident: Incident, entry: Entry | None) -> None:
        """From now on the run stands, unless that was noted already, or it went on all the while."""
        if entry is None or incident.id in self._were_treated:
            return
        self._were_treated.add(incident.id)
        if incident.anomaly.signal not in _GOES_ON:
            self._stands_since[incident.id] = entry["at"]

    def _recall(self, entry: Entry) -> None:
        kind = entry["kind"]
        if kind == IN_FORCE and isinstance(entry.get("remedies"), dict):
            self.remedies = entry["remedies"]
        elif kind == _BEGAN and all(type(entry.get(key)) is int and 0 < entry[key] <= _MOST for key in _MADE_OF):
            self.began_with = (entry["processes"], entry["samples"])
        elif kind == _DATA and _is_sample(entry.get("sample")):
            self.data = entry["sample"]
        elif kind == _TAKEN_FROM and isinstance(entry.get("source"), str):
            self.sources.add(entry["source"])
        elif kind == _SAVED:
            self.has_saved = True
        elif kind == _ENDED and type(entry.get("start")) is int and type(entry.get("stop")) is int:
            self._endings.append((entry["start"], entry["stop"], entry.get("in_first") is True))
        elif kind == FIRED and type(entry.get("drill")) is int:
            self._drills.add(entry["drill"])
            self.struck += strikes([entry])
        elif kind == PHASE and type(entry.get("number")) is int:
            self._stands_since.pop(entry["number"], None)
        elif kind in (OPENED, TREATED, CLOSED):
            try:
                incident = from_line(entry.get("incident"))
            except ValueError as error:
                _log.warning("entry %d of the journal is left out: %s", entry["n"], error)
                return
            self._incidents[incident.id] = incident
            if kind == TREATED:
                self._stands(incident, entry)
            elif kind == CLOSED:
                self._stands_since.pop(incident.id, None)
                self._list(incident)

    def _forget_intentions(self) -> None:
        """Of an incident whose process ended while it was treated, what was decided has not been done."""
        for number, one in self._incidents.items():
            if one.outcome is None and number not in self._were_treated:
                self._incidents[number] = replace(one, decision=replace(one.decision, actions=()))

    def _list(self, incident: Incident) -> str:
        self._lines[incident.id] = json.dumps(as_line(incident)) + "\n"
        return self._lines[incident.id]

    def _holds(self, file: Path | None) -> bool:
        try:
            return file is None or read_plain(file) == "".join(self._lines.values()).encode()
        except OSError:
            return False

    def _renew(self) -> None:
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
            _log.warning("%s cannot be written (%s): it is made anew from the journal later", self._file, why)
        self._is_failing = True


def _is_sample(node: Any) -> bool:
    if not isinstance(node, dict) or type(node.get("rows")) is not int or not isinstance(node.get("digests"), dict):
        return False
    digests = node["digests"]
    return all(row.isdecimal() and (one is None or isinstance(one, str)) for row, one in digests.items())


def recalled(entries: Iterable[Entry]) -> list[Incident]:
    """Return the incidents of a journal as they stand, those that are open included."""
    found: dict[int, Incident] = {}
    for entry in entries:
        if entry["kind"] in (OPENED, TREATED, CLOSED):
            with contextlib.suppress(ValueError):  # damaged: the book says so when the run is taken up
                incident = from_line(entry.get("incident"))
                found[incident.id] = incident
    return [found[number] for number in sorted(found)]


def as_line(incident: Incident) -> dict[str, Any]:
    """Return an incident as incidents.jsonl and the journal hold it: the contract's keys first, then the rest of it.

    `rank` is the first of the ranks it began on, and null if it began on all of them at once.
    """
    anomaly, diagnosis, decision = incident.anomaly, incident.diagnosis, incident.decision
    line = {
        "id": incident.id,
        "step": anomaly.step,
        "tick": anomaly.tick,
        "rank": min(anomaly.ranks, default=None),
        "signal": anomaly.signal,
        "cause": diagnosis.cause,
        "culprit": _line_of(diagnosis.culprit),
        "rows": diagnosis.rows,
        "advice": diagnosis.advice,
        "actions": [{"remedy": action.remedy, **action.settings} for action in decision.actions],
        "rewound_to": incident.rewound_to,
        "steps_lost": incident.steps_lost,
        "seconds": incident.seconds,
        "outcome": incident.outcome,
        "evidence": anomaly.evidence,
        "ranks": anomaly.ranks,
        "follower": _line_of(diagnosis.follower),
        "since": anomaly.since,
        "landed": anomaly.landed,
        "rung": decision.rung,
        "gave_up": decision.gave_up,
        "drill": incident.drill,
        "trace": incident.trace,
    }
    whole: dict[str, Any] = masked_tree(plain(line))
    return whole


def from_line(line: Any) -> Incident:
    """Return the incident that a line tells of; ValueError says which field is not what it should be.

    Keys that are unknown are passed over. Nothing is looked up, imported or built but what `events` defines.
    """
    if not isinstance(line, Mapping):
        raise ValueError(f"an incident cannot be {line!r:.60}")
    step = _whole(line, "step")
    anomaly = Anomaly(
        signal=Signal(_take(line, "signal", str)),
        step=step,
        tick=_whole(line, "tick"),
        since=_whole(line, "since", max(0, step - 1)),
        evidence=_take(line, "evidence", str, default=""),
        landed=_take(line, "landed", bool, default=True),
        ranks=_wholes(line, "ranks"),
    )
    culprit, follower = _take(line, "culprit", dict, None), _take(line, "follower", dict, default=None)
    diagnosis = Diagnosis(
        cause=Cause(_take(line, "cause", str)),
        advice=_take(line, "advice", str),
        culprit=None if culprit is None else _culprit(culprit),
        rows=_wholes(line, "rows"),
        follower=None if follower is None else _culprit(follower),
    )
    decision = Decision(
        actions=tuple(_action(action) for action in _dicts(line, "actions")),
        rung=_whole(line, "rung", 0),
        gave_up=_take(line, "gave_up", str, None, default=None),
    )
    outcome = _take(line, "outcome", str, None)
    seconds = _take(line, "seconds", int, float)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"an incident cannot have seconds={seconds}")
    return Incident(
        id=_whole(line, "id"),
        anomaly=anomaly,
        diagnosis=diagnosis,
        decision=decision,
        rewound_to=None if line.get("rewound_to") is None else _whole(line, "rewound_to"),
        steps_lost=_whole(line, "steps_lost"),
        seconds=float(seconds),
        outcome=None if outcome is None else Outcome(outcome),
        drill=_take(line, "drill", str, default=""),
        trace=_whole(line, "trace", 0),
    )


def _line_of(culprit: Culprit | None) -> dict[str, Any] | None:
    return None if culprit is None else {name: getattr(culprit, name) for name in Culprit.__slots__}


def _culprit(line: Mapping[str, Any]) -> Culprit:
    words = {name: _take(line, name, str) for name in ("phase", "op", "module", "file")}
    return Culprit(**words, line=_whole(line, "line"), inputs=_dicts(line, "inputs"))


def _action(line: Mapping[str, Any]) -> Action:
    return Action(_take(line, "remedy", str), {key: value for key, value in line.items() if key != "remedy"})


_NEEDED = object()


def _take(line: Mapping[str, Any], name: str, *kinds: type | None, default: Any = _NEEDED) -> Any:
    """Return a field that is exactly of one of `kinds`, where None stands for null; a bool is no whole number."""
    value = line.get(name, default)
    if value is _NEEDED:
        raise ValueError(f"an incident lacks {name}")
    if (None if value is None else type(value)) not in (*kinds, *([None] if default is None else [])):
        raise ValueError(f"an incident cannot have {name}={value!r:.60}")
    return value


def _whole(line: Mapping[str, Any], name: str, default: Any = _NEEDED) -> int:
    value: int = _take(line, name, int, default=default)
    if value < 0:
        raise ValueError(f"an incident cannot have {name}={value}")
    return value


def _wholes(line: Mapping[str, Any], name: str) -> tuple[int, ...]:
    values = _take(line, name, list, default=[])
    return tuple(_whole({name: value}, name) for value in values)


def _dicts(line: Mapping[str, Any], name: str) -> tuple[dict[str, Any], ...]:
    values = _take(line, name, list, default=[])
    return tuple(_take({name: value}, name, dict) for value in values)
