"""The story of a run, read from its directory for status lines, reports, traces and pictures.

It reads what the run has written, also while it is at work, and changes nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from resilient_train.files import read_json, read_plain
from resilient_train.record.endings import (
    CHECKPOINTS,
    SUMMARY,
    Loop,
    ended_as,
    loop_of,
    read_ending,
    resumes,
    settings_of,
    why_incomplete,
)
from resilient_train.record.incident_lines import from_line
from resilient_train.record.incident_log import CLOSED, OPENED, TREATED
from resilient_train.record.journal import JOURNAL, Entry, entries_after
from resilient_train.record.outbox import seal_before
from resilient_train.record.progress import position_of
from resilient_train.record.run_history import DRILL_FIRED, REMEDIES, FiredDrill, fired_drills, with_earlier
from resilient_train.types import Cause, Incident, Outcome, kind_of
from resilient_train.wording import rows_to_look_at

_CHECKPOINT = re.compile(r"step-\d{8,18}(\.\d+)?")
_QUIET = 50  # updates without what came back, after which it is over
_REPEATS = (Cause.EXPLOSION, Cause.RATE, Cause.OVERFLOW)  # the next run of this configuration meets it, too
LARGEST_SOURCE = 2**22  # bytes
_MOST_ROWS = 8  # that are named

_SENTENCES = re.compile(r"(?<=\.) (?=[A-Z`])")
_NUMBERS = re.compile(r"(?P<name>`[^`]*`)|\[[\d, ]+\]|\b(?:nan|inf)\b|(?<![\w.])[+-]?\d[\d.,]*(?:e[+-]?\d+)?\b")


@dataclass(frozen=True, slots=True)
class Chapter:
    """An incident and its times."""

    incident: Incident
    opened_ms: int  # since 1970
    treated_ms: int | None = None  # None while something is being done about it
    closed_ms: int | None = None  # None until the outcome is known


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state, or weights alone, as the JSON file next to the tensors describes it."""

    step: int
    path: Path  # absolute
    kind: str  # verified; candidate: not yet verified; best: verified weights with the least evaluation loss
    tick: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    remedies: Mapping[str, Any] = field(default_factory=dict)  # active when it was written

    @property
    def is_verified(self) -> bool:
        """Say whether the updates after it were healthy, too."""
        return self.kind == "verified"


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change, and the numbers of the incidents that ask for it."""

    text: str
    incidents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Story:
    """What a person wants to know about a run."""

    directory: Path  # absolute
    chapters: tuple[Chapter, ...]  # in the order they were met
    status: str  # clean, recovered, unrecovered, no_progress, above_best, recovering, gave_up, preempted, failed
    began_ms: int | None = None  # when its first process wrote the first entry of the journal
    step: int = 0  # accepted updates
    tick: int = 0  # attempted ones
    steps: int | None = None  # planned
    summary: Mapping[str, Any] | None = None  # None while it is at work, or was killed
    why: str = ""  # why it failed
    is_killed: bool = False  # its process ended without a summary or an error
    last_good: Checkpoint | None = None  # the newest verified one
    newest: Checkpoint | None = None  # that a resume would load: the same, or a later candidate
    best: Checkpoint | None = None  # weights alone
    remedies: Mapping[str, Any] | None = None  # active, as they were last written down
    advice: tuple[Advice, ...] = ()  # still open, the most important first
    loop: Loop | None = None  # of the caller; None for a run of the command
    fired_drills: tuple[FiredDrill, ...] = ()
    resumes: bool = True  # by the same command, which otherwise starts a new run

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """The incidents, without the times."""
        return tuple(chapter.incident for chapter in self.chapters)

    @property
    def is_complete(self) -> bool:
        """Say whether the run made all the updates that were planned."""
        return self.summary is not None and self.summary.get("status") == "completed"


def read_story(run_dir: Path) -> Story:
    """Read the story of the run in a directory up to now."""
    return StoryReader(run_dir).read()


class StoryReader:
    """Reads the story of a run again and again; of its journal only what is new, which may have many incidents."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._journal = run_dir.absolute(), run_dir / JOURNAL
        self._start()

    def _start(self) -> None:
        self._end, self._number, self._seal = 0, 0, seal_before(self._journal, 0)
        self._found: dict[int, Chapter] = {}
        self._began_ms: int | None = None
        self._remedies: Mapping[str, Any] | None = None  # as they were last written down
        self._drills: list[Entry] = []
        # Text and count of each line, by file and number, as it was patched last.
        self._patched: dict[tuple[str, int], tuple[str, int]] = {}

    def _read_journal(self) -> None:
        if self._seal != seal_before(self._journal, self._end):  # another file took its place
            self._start()
        for entry, end in entries_after(self._journal, self._end, self._number):
            self._end, self._number = end, entry["n"]
            self._began_ms = entry["at"] if self._began_ms is None else self._began_ms
            self._add(entry)
            if entry["kind"] == REMEDIES and isinstance(remedies := entry.get("remedies"), dict):
                self._remedies = with_earlier(remedies, self._remedies)
                for one in remedies["armor"] if isinstance(remedies.get("armor"), list) else ():
                    match one:
                        case {"file": str(file), "line": int(line), "text": str(text), "count": int(count)}:
                            self._patched[file, line] = text, count
            elif entry["kind"] == DRILL_FIRED:
                self._drills.append(entry)
        self._seal = seal_before(self._journal, self._end)

    def _add(self, entry: Entry) -> None:
        found, kind = self._found, entry["kind"]
        if kind not in (OPENED, TREATED, CLOSED):
            return
        try:
            incident = from_line(entry.get("incident"))
        except ValueError:  # damaged: the incident log says so when the run resumes
            return
        chapter = replace(found.get(incident.id, Chapter(incident, entry["at"])), incident=incident)
        if kind == TREATED and chapter.treated_ms is None:  # a second entry only adds what is known since
            chapter = replace(chapter, treated_ms=entry["at"])
        elif kind == CLOSED:
            chapter = replace(chapter, closed_ms=entry["at"])
        found[incident.id] = chapter

    def read(self) -> Story:
        """Return the story up to now."""
        run_dir = self._run_dir
        self._read_journal()
        found = tuple(self._found[number] for number in sorted(self._found))
        incidents = [one.incident for one in found]
        summary, position, checkpoints = read_ending(run_dir, SUMMARY), position_of(run_dir), checkpoints_of(run_dir)
        step, tick = (position.step, position.tick) if position is not None else (0, 0)
        if summary is not None:
            step, tick = (_whole(summary.get(key), known) for key, known in (("steps", step), ("ticks", tick)))
        end = ended_as(run_dir)
        status = "failed" if end in ("killed", "failed") else status_by(incidents, summary, step=step)
        why = why_incomplete(run_dir, summary) if status == "failed" and end != "killed" else None
        changed = {line for line, (text, count) in self._patched.items() if _is_changed(line[0], text, count)}
        # A checkpoint may be newer than the journal, as knobs relax.
        remedies = [one for one in (self._remedies, *(one.remedies for one in checkpoints)) if one is not None]
        return Story(
            directory=run_dir,
            chapters=found,
            status=status,
            began_ms=self._began_ms,
            step=step,
            tick=max(tick, step),
            steps=planned_steps(run_dir),
            summary=summary,
            why=why or "",
            is_killed=end == "killed",
            last_good=next((one for one in checkpoints if one.is_verified), None),
            newest=next(iter(checkpoints), None),
            best=_best_of(run_dir),
            remedies=max(remedies, key=lambda one: _whole(one.get("tick"), 0), default=None),
            advice=open_advice([one for one in incidents if _line_of(one) not in changed]),
            loop=loop_of(run_dir),
            fired_drills=fired_drills(self._drills),
            resumes=resumes(run_dir),
        )


def _line_of(incident: Incident) -> tuple[str, int] | None:
    culprit = incident.diagnosis.culprit
    return (culprit.file, culprit.line) if culprit is not None else None


def _is_changed(file: str, text: str, count: int) -> bool:
    """Say whether a line that was patched is not in its source any more."""
    path = Path(file)
    if not text or path.suffix != ".py" or not path.is_absolute():
        return False
    try:
        lines = [line.strip() for line in read_plain(path, most=LARGEST_SOURCE).decode().split("\n")]
    except (OSError, ValueError):  # on another machine, perhaps
        return False
    return lines.count(text) <= count


def _whole(value: Any, otherwise: int) -> int:
    return value if type(value) is int and value >= 0 else otherwise


def status_by(incidents: Sequence[Incident], summary: Mapping[str, Any] | None = None, *, step: int = 0) -> str:
    """Say in one word how a run fares at a step, by its incidents and by the summary that its last end wrote.

    That is clean, recovered, recovering, observed, unrecovered, no_progress, above_best, gave_up, preempted or failed.
    """
    ended = summary.get("status") if summary is not None else None
    if ended in ("gave_up", "preempted", "failed"):
        return str(ended)
    verdict = summary.get("verdict") if ended == "completed" and summary is not None else None
    if verdict in ("no_progress", "above_best"):
        return str(verdict)
    if all(one.is_accepted for one in incidents):
        return "clean"
    if incidents[-1].outcome is Outcome.GAVE_UP:
        return "gave_up"
    if unrecovered(incidents, step) is not None:
        return "unrecovered"
    if any(one.is_observed for one in incidents):
        return "observed"
    return "recovering" if any(one.outcome is None for one in incidents) else "recovered"


def unrecovered(incidents: Sequence[Incident], step: int) -> Incident | None:
    """Return one that is unrecovered, or that came back, with none of its kind later that was over.

    What was before the run gave up does not count: it was started with other settings since. Nor does what came back
    up to an earlier end of the run, and not since it was extended.
    """
    given_up = max((place for place, one in enumerate(incidents) if one.decision.gave_up is not None), default=-1)
    since = incidents[given_up + 1 :]
    newest = {kind_of(one.anomaly, one.diagnosis): one for one in since}.values()
    left = (one for one in newest if one.outcome is Outcome.RECURRED and step < one.last_step + _QUIET)
    return next((one for one in since if one.outcome is Outcome.UNRECOVERED), next(left, None))


def planned_steps(run_dir: Path) -> int | None:
    """Return how many updates a run is configured to make; None if its configuration does not say."""
    if (loop := loop_of(run_dir)) is not None:
        return loop.steps
    steps = settings_of(run_dir).get("steps")
    return steps if type(steps) is int else None


# -------------------------------------------------------------------------------------------------- checkpoints on disk


def checkpoints_of(run_dir: Path) -> list[Checkpoint]:
    """List what a resume may load, the latest first. Checksums are not verified."""
    try:
        names = [path for path in (run_dir / CHECKPOINTS).iterdir() if _CHECKPOINT.fullmatch(path.name)]
    except OSError:
        return []
    found = [one for path in names if (one := _checkpoint(path.absolute())) is not None]
    return sorted(found, key=lambda one: (one.tick, one.step, one.path.name), reverse=True)


def last_good_of(run_dir: Path) -> Checkpoint | None:
    """Return the newest checkpoint that is verified by its manifest."""
    return next((one for one in checkpoints_of(run_dir) if one.is_verified), None)


def _best_of(run_dir: Path) -> Checkpoint | None:
    path = run_dir / "best"
    node = read_json(path / "best.json")
    step = node.get("step") if isinstance(node, dict) else None
    if type(step) is not int or step < 0 or not (path / "weights.safetensors").is_file():
        return None
    numbers = {name: one for name, one in node.items() if name != "step" and type(one) in (int, float)}
    metrics = {str(name): float(one) for name, one in numbers.items() if math.isfinite(one)}
    return Checkpoint(step, path, "best", metrics=metrics)


def _checkpoint(path: Path) -> Checkpoint | None:
    """Read a manifest; None if the checkpoint is demoted or damaged, or a file is missing or has another size."""
    match read_json(path / "manifest.json"):
        case {
            "kind": "verified" | "candidate" as kind,
            "step": int(step),
            "tick": int(tick),
            "files": dict(files),
            "remedies": dict(remedies),
        } if min(step, tick) >= 0 and files and all(_is_there(path / name, one) for name, one in files.items()):
            return Checkpoint(step, path, kind, tick, remedies=remedies)
    return None


def _is_there(file: Path, written: Any) -> bool:
    try:
        return isinstance(written, dict) and file.lstat().st_size == written.get("bytes")
    except (OSError, ValueError):
        return False


# ------------------------------------------------------------------------------------------------------- what to change


def open_advice(incidents: Sequence[Incident]) -> tuple[Advice, ...]:
    """Return what a person should change, the most important first: each line, each setting and all rows only once.

    First what the run could not cure, then what it has not cured yet, then what it only avoids: patched lines, rows in
    quarantine, changed settings. What happened once, was over and did not return needs no change, nor does what a drill
    made.
    """
    incidents = [one for one in incidents if not one.drill and one.diagnosis.advice.strip()]
    newest = set({kind_of(one.anomaly, one.diagnosis): one.id for one in incidents}.values())
    times = Counter(kind for one in incidents for kind in [_kind(one)] * (1 + bool(one.further)))
    first_of_line: dict[object, object] = {}  # what each line asks for
    groups: dict[object, list[Incident]] = {}
    urgencies: dict[object, int] = {}
    for one in sorted(incidents, key=lambda one: one.diagnosis.symptom is not None):
        diagnosis, kind = one.diagnosis, _kind(one)
        about: object = "rows" if diagnosis.rows else _asked(diagnosis.advice)
        about = "look at" if rows_to_look_at(diagnosis.advice) else about
        if diagnosis.culprit is not None:
            # An operation that failed only because of another line asks for the same as that line.
            first = first_of_line.setdefault(kind, (kind, diagnosis.cause))
            about = (kind, diagnosis.cause) if diagnosis.symptom is None else first
        if (urgency := _urgency(one, times[kind] > 1, one.id in newest)) is not None:
            groups.setdefault(about, []).append(one)
            urgencies[about] = min(urgency, urgencies.get(about, urgency))

    def order(about: object) -> tuple[int, int, int]:
        group, urgency = groups[about], urgencies[about]
        return urgency, -len(group) if urgency > _NOT_OVER else 0, -max(one.id for one in group)

    return tuple(
        Advice(_words(groups[about]), tuple(sorted(one.id for one in groups[about])))
        for about in sorted(groups, key=order)
    )


_NOT_OVER = 2  # the urgency of what may not be over; above it, what comes more often is more urgent


def _urgency(one: Incident, is_repeated: bool, is_newest: bool) -> int | None:
    """Return the place of an incident's advice in the order; None if it asks for nothing."""
    if one.outcome is Outcome.GAVE_UP:
        return 0
    if one.outcome is Outcome.UNRECOVERED or (one.outcome is Outcome.RECURRED and is_newest):
        return 1
    if one.outcome in (None, Outcome.OBSERVED):
        return _NOT_OVER
    if one.diagnosis.culprit is not None:
        return 3
    if one.diagnosis.rows:
        return 4
    if one.diagnosis.cause in _REPEATS:
        return 5
    return 6 if is_repeated else None


def _kind(incident: Incident) -> object:
    """Return what two incidents of a kind have in common: the line, the rows, or the cause and the signal."""
    diagnosis = incident.diagnosis
    if (culprit := diagnosis.culprit) is not None:
        return culprit.file, culprit.line, culprit.op
    return diagnosis.rows or (diagnosis.cause, incident.anomaly.signal)


def request_of(advice: str) -> str:
    """Return the sentence of an advice that asks for something. Those after it are hints."""
    words = " ".join(advice.split())
    return next((one for one in _SENTENCES.split(words) if ": " in one), words)


def _asked(advice: str) -> str:
    """Return what an advice asks for without its numbers, which differ from incident to incident.

    Names stay: another tensor is another place to look at.
    """
    return _NUMBERS.sub(lambda found: found["name"] or "#", request_of(advice))


def _words(group: Sequence[Incident]) -> str:
    """Name all rows, or take the words of the newest incident, if possible not of one that another line caused."""
    by_rows = [one.diagnosis for one in group if one.diagnosis.culprit is None or one.diagnosis.cause is Cause.DATA]
    rows = sorted({row for one in by_rows for row in one.rows})
    if len(group) > 1 and len(rows) > 1:
        last = max(group, key=lambda one: one.id).diagnosis.advice
        return f"Fix or remove rows {_listed(rows)}: quarantine.json has the reason for each. The last: {last}"
    if len(rows := sorted({row for one in group for row in rows_to_look_at(one.diagnosis.advice)})) > 1:
        return f"Look at rows {_listed(rows)}: the batches are ordinary without them."
    newest = max(group, key=lambda one: (one.diagnosis.symptom is None, one.id))
    return " ".join(newest.diagnosis.advice.split())


def _listed(rows: Sequence[int]) -> str:
    more = f" and {len(rows) - _MOST_ROWS:,} more" if rows[_MOST_ROWS:] else ""
    return ", ".join(map(str, rows[:_MOST_ROWS])) + more
