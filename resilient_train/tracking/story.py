"""A run as data, read from its directory without changing it: the terminal, the report, MLflow and verbs show it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from resilient_train.files import read_json
from resilient_train.record.endings import (
    CHECKPOINTS,
    Loop,
    RunFacts,
    Status,
    Summary,
    facts_of,
    loop_of,
    resumes,
    settings_of,
    status_of,
)
from resilient_train.record.journal import JOURNAL, read
from resilient_train.record.progress import position_of
from resilient_train.record.run_history import Chapter, RunHistory
from resilient_train.types import Cause, Facts, Incident, Outcome, fact

_CHECKPOINT = re.compile(r"step-\d{8,18}(\.\d+)?")
_REPEATS = (Cause.EXPLOSION, Cause.RATE, Cause.OVERFLOW)  # the next run of this configuration meets it, too


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    path: Path  # absolute
    kind: str  # verified; candidate: not yet verified; best: verified weights with the least evaluation loss
    tick: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    remedies: Mapping[str, Any] = field(default_factory=dict)  # active when it was written


@dataclass(frozen=True, kw_only=True)
class Story(Status):
    directory: Path | None  # absolute; None if the run writes nothing
    chapters: tuple[Chapter, ...]  # in the order they were met
    step: int = 0  # accepted updates
    tick: int = 0  # attempted ones
    steps: int | None = None  # planned
    last_good: Checkpoint | None = None  # the newest verified one
    newest: Checkpoint | None = None  # that a resume would load: the same, or a later candidate
    best: Checkpoint | None = None  # weights alone
    remedies: Mapping[str, Any] = field(default_factory=dict)  # active, as they were last written down
    loop: Loop | None = None  # of the caller; None for a run of the command
    resumes: bool = True  # by the same command, which otherwise starts a new run

    @property
    def incidents(self) -> tuple[Incident, ...]:
        return tuple(chapter.incident for chapter in self.chapters)

    @property
    def advice(self) -> list[Advice]:
        """What to change, the most important first."""
        return open_advice(self.incidents)

    @property
    def is_complete(self) -> bool:
        return self.state == "completed"


def read_story(run_dir: Path) -> Story:
    """Read the story of the run in a directory up to now. Raises OSError if its journal cannot be read."""
    run_dir = run_dir.absolute()
    facts = facts_of(run_dir)  # first: then the journal has what the run wrote before its end
    history = RunHistory(read(run_dir / JOURNAL))
    found = tuple(history.chapters.values())
    checkpoints, loop, position = checkpoints_of(run_dir), loop_of(run_dir), position_of(run_dir)
    step, tick = (facts.summary.get(key, here) for key, here in (("steps", position.step), ("ticks", position.tick)))
    planned = settings_of(run_dir).get("steps") if loop is None else loop.steps
    status = status_of(replace(facts, incidents=[one.incident for one in found], step=step))
    return Story(
        **vars(status),
        directory=run_dir,
        chapters=found,
        step=step,
        tick=max(tick, step),
        steps=planned if type(planned) is int else None,
        last_good=next((one for one in checkpoints if one.kind == "verified"), None),
        newest=next(iter(checkpoints), None),
        best=_best_of(run_dir),
        remedies=history.effects_with(checkpoints[0].remedies if checkpoints else {}),
        loop=loop,
        resumes=resumes(run_dir),
    )


def story_of(summary: Summary, incidents: Sequence[Incident], remedies: Mapping[str, Any] | None) -> Story:
    """Return the story of a run that writes nothing, from what its process knows at its end."""
    status = status_of(RunFacts(incidents=incidents, step=summary.steps, summary=asdict(summary)))
    return Story(
        **vars(status),
        directory=None,
        chapters=tuple(Chapter(one, 0) for one in incidents),
        step=summary.steps,
        tick=summary.ticks,
        remedies=remedies or {},
    )


def checkpoints_of(run_dir: Path) -> list[Checkpoint]:
    """List what a resume may load, the latest first. Checksums are not verified."""
    paths = [path for path in (run_dir / CHECKPOINTS).glob("step-*") if _CHECKPOINT.fullmatch(path.name)]
    found = [one for path in paths if (one := _checkpoint(path.absolute())) is not None]
    return sorted(found, key=lambda one: (one.tick, one.step, one.path.name), reverse=True)


def _best_of(run_dir: Path) -> Checkpoint | None:
    path = run_dir / "best"
    match read_json(path / "best.json"):
        case {"step": int(step), **metrics} if (path / "weights.safetensors").is_file():
            numbers = {str(name): one for name, one in metrics.items() if isinstance(one, int | float)}
            return Checkpoint(step, path, "best", metrics={name: one for name, one in numbers.items() if isfinite(one)})
    return None


def _checkpoint(path: Path) -> Checkpoint | None:
    """Read a manifest; None if the checkpoint is demoted or damaged, or a file is missing or has another size."""
    match read_json(path / "manifest.json"):
        case {
            "kind": "verified" | "candidate" as kind,
            "step": int(step),
            "tick": int(tick),
            "files": dict(files),
            "effects": dict(remedies),
        } if min(step, tick) >= 0 and files and all(_is_there(path / name, one) for name, one in files.items()):
            return Checkpoint(step, path, kind, tick, remedies=remedies)
    return None


def _is_there(file: Path, written: Any) -> bool:
    try:
        return isinstance(written, dict) and file.lstat().st_size == written.get("bytes")
    except (OSError, ValueError):
        return False


class Advice(NamedTuple):
    facts: Facts
    incidents: list[int]  # the numbers of those that ask for it


def open_advice(incidents: Sequence[Incident]) -> list[Advice]:
    """Return what a person should change, the most important first: each line, all rows and each setting only once.

    What happened once, was over and did not return needs no change, nor does what a drill made.
    """
    groups: dict[object, list[Incident]] = {}
    for one in incidents:
        if not one.drill and one.diagnosis.advice:
            groups.setdefault(_asks_about(one), []).append(one)
    urgent = [group for group in groups.values() if _urgency(group) < _NOT_URGENT]
    urgent.sort(key=lambda group: (_urgency(group), -len(group)))
    return [Advice(_facts(group), [one.id for one in group]) for group in urgent]


def _asks_about(incident: Incident) -> object:
    diagnosis = incident.diagnosis
    if (culprit := diagnosis.culprit) is not None:
        return culprit.file, culprit.line, culprit.op
    if diagnosis.suspects:
        return "rows to look at"
    return "bad rows" if diagnosis.rows else (diagnosis.cause, *(one["fact"] for one in diagnosis.advice))


_NOT_URGENT = 7


def _urgency(group: Sequence[Incident]) -> int:
    """Return the place in the order of what some incidents ask for; the last one if they ask for nothing."""
    last, outcomes = group[-1], {one.outcome for one in group}
    reasons = [
        Outcome.GAVE_UP in outcomes,
        Outcome.UNRECOVERED in outcomes or last.outcome is Outcome.RECURRED,
        bool(outcomes & {None, Outcome.OBSERVED}),
        last.diagnosis.culprit is not None,
        bool(last.diagnosis.rows),
        last.diagnosis.cause in _REPEATS,
        len(group) > 1 or last.further > 0 or last.is_accepted,
        True,
    ]
    return reasons.index(True)


def _facts(group: Sequence[Incident]) -> Facts:
    """Name all rows, or take the advice of the newest incident, if possible not of one that another line caused."""
    newest = max(group, key=lambda one: (one.diagnosis.symptom is None, one.id)).diagnosis
    are_bad = newest.culprit is None or newest.cause is Cause.DATA
    rows = {row for one in group for row in one.diagnosis.rows}
    if are_bad and len(rows) > 1 and len(group) > 1:
        return fact("all_bad_rows", rows=sorted(rows)) + newest.advice
    if len(rows := {row for one in group for row in one.diagnosis.suspects}) > 1:
        return fact("all_ordinary_rows", rows=sorted(rows))
    return newest.advice
