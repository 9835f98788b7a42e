"""The story of a run, as its directory tells it: for reports, traces and pictures.

It reads what the run has written, also while it goes on, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from resilient_train.events import Incident
from resilient_train.files import read_json
from resilient_train.record.incidents import CLOSED, OPENED, PHASE, TREATED, from_line
from resilient_train.record.journal import JOURNAL, Entry, read
from resilient_train.record.telling import status_of

_LATEST_MS = 2**42  # a time after the year 2100 is none


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the treatment of an incident: detect, diagnose, decide, rewind, remedy, resume."""

    name: str
    began_ms: int  # since 1970
    ended_ms: int


@dataclass(frozen=True, slots=True)
class Chapter:
    """An incident, and when each part of it was."""

    incident: Incident
    opened_ms: int
    treated_ms: int | None = None  # null while something is being done about it
    closed_ms: int | None = None  # null until the outcome is known
    phases: tuple[Phase, ...] = ()


@dataclass(frozen=True, slots=True)
class Story:
    """What a person wants to know of a run."""

    directory: Path
    chapters: tuple[Chapter, ...]  # in the order they were met
    status: str  # clean, recovered, recovering, gave_up, preempted, failed


def chapters(entries: Iterable[Entry]) -> tuple[Chapter, ...]:
    """Return the incidents of a journal with their times, the open ones included."""
    found: dict[int, Chapter] = {}
    for entry in entries:
        if entry["kind"] == PHASE and type(number := entry.get("number")) is int and number in found:
            chapter = found[number]
            found[number] = replace(chapter, phases=chapter.phases + _phases([entry.get("phase")]))
        if entry["kind"] not in (OPENED, TREATED, CLOSED):
            continue
        try:
            incident = from_line(entry.get("incident"))
        except ValueError:  # damaged: the book says so when the run is taken up
            continue
        chapter = replace(found.get(incident.id, Chapter(incident, entry["at"])), incident=incident)
        if phases := _phases(entry.get("phases")):
            chapter = replace(chapter, phases=phases)
        if entry["kind"] == TREATED and chapter.treated_ms is None:  # a second one only tells what more is known
            chapter = replace(chapter, treated_ms=entry["at"])
        elif entry["kind"] == CLOSED:
            chapter = replace(chapter, closed_ms=entry["at"])
        found[incident.id] = chapter
    return tuple(found[number] for number in sorted(found))


def told(run_dir: Path) -> Story:
    """Read the story of the run in a directory, as far as it goes now."""
    found = chapters(read(run_dir / JOURNAL))
    return Story(run_dir, found, status_of([one.incident for one in found], read_json(run_dir / "summary.json")))


def _phases(written: Any) -> tuple[Phase, ...]:
    """What a treatment consisted of; of what is damaged, nothing."""
    try:
        found = tuple(Phase(str(name), int(began), int(ended)) for name, began, ended in written or ())
    except (TypeError, ValueError, OverflowError):
        return ()
    return found if all(0 <= one.began_ms <= one.ended_ms <= _LATEST_MS for one in found) else ()
