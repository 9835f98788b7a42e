"""The story of a run, as its directory tells it: for reports, traces and pictures.

It reads what the run has written, also while it goes on, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from resilient_train.record.drills import Strike, strikes
from resilient_train.record.endings import SUMMARY, stands, why_of
from resilient_train.record.endings import told as ending_told
from resilient_train.record.facts import IN_FORCE
from resilient_train.record.incident_lines import from_line
from resilient_train.record.incident_log import CLOSED, OPENED, PHASE, TREATED
from resilient_train.record.journal import JOURNAL, Entry, read
from resilient_train.record.left import Checkpoint, best_of, checkpoints_of, last_good_of
from resilient_train.record.loop import Loop, loop_of
from resilient_train.record.mending import Advice, still_open
from resilient_train.record.progress import stand_of, steps_wanted
from resilient_train.record.quarantine import reasons
from resilient_train.types import Incident
from resilient_train.wording import status_of

_KILLED = "its process was killed (no exit message)"
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

    directory: Path  # absolute
    chapters: tuple[Chapter, ...]  # in the order they were met
    status: str  # clean, recovered, recovering, gave_up, preempted, failed
    step: int = 0  # accepted updates
    tick: int = 0  # attempted ones
    steps: int | None = None  # that are wanted
    summary: Mapping[str, Any] | None = None  # what its last end wrote; null while it is at work, or was killed
    why: str = ""  # it ended in failure
    last_good: Checkpoint | None = None  # the newest that is proven
    newest: Checkpoint | None = None  # that a resume would take: the same, or a candidate behind it
    best: Checkpoint | None = None  # weights alone
    quarantined: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))  # rows, and why
    remedies: Mapping[str, Any] | None = None  # in force, as they were last written down
    advice: tuple[Advice, ...] = ()  # still open, the most important first
    loop: Loop | None = None  # somebody's own, and no run of ours
    strikes: tuple[Strike, ...] = ()  # of a drill

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.directory.name

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """What was met, without the times."""
        return tuple(chapter.incident for chapter in self.chapters)

    @property
    def is_complete(self) -> bool:
        """Say whether the run has made all the updates that were wanted."""
        return self.summary is not None and self.summary.get("status") == "completed"


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
    run_dir = run_dir.absolute()
    entries = read(run_dir / JOURNAL)
    found = chapters(entries)
    incidents = [one.incident for one in found]
    summary, stand, checkpoints = ending_told(run_dir, SUMMARY), stand_of(run_dir), checkpoints_of(run_dir)
    step, tick = (stand.step, stand.tick) if stand is not None else (0, 0)
    if summary is not None:
        step, tick = (_whole(summary.get(key), known) for key, known in (("steps", step), ("ticks", tick)))
    stands_as = stands(run_dir)
    was_killed = stands_as == "killed"
    status = "failed" if was_killed or stands_as == "failed" else status_of(incidents, summary)
    return Story(
        directory=run_dir,
        chapters=found,
        status=status,
        step=step,
        tick=max(tick, step),
        steps=steps_wanted(run_dir),
        summary=summary,
        why=_KILLED if was_killed else why_of(run_dir, summary) or "" if status == "failed" else "",
        last_good=last_good_of(run_dir),
        newest=next(iter(checkpoints), None),
        best=best_of(run_dir),
        quarantined=reasons(run_dir),
        remedies=_in_force(entries, checkpoints),
        advice=still_open(incidents),
        loop=loop_of(run_dir),
        strikes=strikes(entries),
    )


def _phases(written: Any) -> tuple[Phase, ...]:
    """What a treatment consisted of; of what is damaged, nothing."""
    try:
        found = tuple(Phase(str(name), int(began), int(ended)) for name, began, ended in written or ())
    except (TypeError, ValueError, OverflowError):
        return ()
    return found if all(0 <= one.began_ms <= one.ended_ms <= _LATEST_MS for one in found) else ()


def _in_force(entries: Iterable[Entry], checkpoints: Iterable[Checkpoint]) -> Mapping[str, Any] | None:
    """The remedies that were written down last: knobs relax after what the journal has, and a checkpoint tells."""
    known = [one.get("remedies") for one in entries if one["kind"] == IN_FORCE][-1:]
    known += [one.remedies for one in checkpoints]
    return max(
        (one for one in known if isinstance(one, dict)), key=lambda one: _whole(one.get("tick"), 0), default=None
    )


def _whole(value: Any, otherwise: int) -> int:
    return value if type(value) is int and value >= 0 else otherwise
