"""An incident as a block of lines, for a person at a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from resilient_train.app.page import Page, Words
from resilient_train.files import read_plain
from resilient_train.record.journal import Entry
from resilient_train.record.run_history import REMEDIES
from resilient_train.tracking.review import began_ms
from resilient_train.tracking.story import Chapter
from resilient_train.types import Culprit, Outcome
from resilient_train.wording import (
    describe_cost,
    describe_culprit,
    duration,
    noticed,
    reached,
    remedies_of,
    rows_named,
    why_of,
)

_LARGEST_SOURCE = 2**22  # bytes
_LABELS = 9  # columns

_OUTCOMES = {
    Outcome.RECOVERED: ("recovered", "green"),
    Outcome.RECURRED: ("the same trouble came back: what was done was not enough", "yellow"),
    Outcome.UNRECOVERED: ("unrecovered: it was not over at the end of the run", "red"),
    Outcome.GAVE_UP: ("gave up", "red"),
    None: ("open: it counts as recovered once the run has stayed healthy", "yellow"),
}


def show_block(chapter: Chapter, entries: Sequence[Entry], page: Page) -> None:
    """Show an incident: when, what, why, who, what was done, what it cost, what became of it, what to do."""
    incident, row = chapter.incident, partial(_row, page)
    anomaly, diagnosis = incident.anomaly, incident.diagnosis
    page.blank()
    when = f"incident {incident.id:,}  {_clock(chapter.opened_ms)}{_since(chapter, entries)}"
    page.line((when, "bold"), f"  step {anomaly.step:,}, tick {anomaly.tick:,}", hang=2)
    row("noticed", noticed(anomaly) + reached(anomaly))
    row("", anomaly.evidence)
    if incident.drill:
        row("drill", f"{incident.drill}, on purpose")
    row("cause", str(diagnosis.cause) + (f": {rows_named(diagnosis.rows)}" if diagnosis.rows else ""))
    for culprit in (diagnosis.culprit, diagnosis.symptom):
        if culprit is not None:
            row("culprit" if culprit is diagnosis.culprit else "then", describe_culprit(culprit))
            row("", _source(culprit, chapter, entries), style="italic")
    row("cure", _cure(chapter))
    row("cost", describe_cost(incident))
    row("outcome", *_outcome(chapter))
    row("advice", diagnosis.advice)


def _row(page: Page, label: str, said: str, style: str = "") -> None:
    """One line under a label, or under the one before it."""
    said = " ".join(said.split()) if style != "italic" else said.strip()
    if not said:
        return
    is_narrow = page.width is not None and page.width < 60
    words: list[Words] = [(said, style)]
    if is_narrow and label:
        page.line((f"{label}: ", "dim"), *words, indent=2, hang=4)
    elif is_narrow:
        page.line(*words, indent=4, hang=4)
    else:
        page.line((f"{label:{_LABELS}}", "dim"), *words, indent=2, hang=2 + _LABELS)


def outcome_in_short(outcome: Outcome | None) -> tuple[str, str]:
    """What became of an incident, and in which style."""
    words, style = _OUTCOMES[outcome]
    return words.partition(":")[0], style


def _clock(ms: int) -> str:
    with suppress(ValueError, OverflowError, OSError):  # a damaged journal may say anything
        return f"{datetime.fromtimestamp(ms / 1000):%Y-%m-%d %H:%M:%S}"
    return "at an unknown time"


def _since(chapter: Chapter, entries: Sequence[Entry]) -> str:
    began = began_ms(entries)
    seconds = (chapter.opened_ms - began) / 1000 if began is not None else -1.0
    return f" ({duration(seconds)} after the start)" if 0 <= seconds < 1e9 else ""


def _cure(chapter: Chapter) -> str:
    incident = chapter.incident
    if incident.decision.gave_up is not None:
        return f"gave up: {why_of(incident)}"
    if chapter.treated_ms is None and incident.outcome is None:
        return "being treated"
    return remedies_of(incident) or "nothing was done"


def _outcome(chapter: Chapter) -> tuple[str, str]:
    words, style = _OUTCOMES[chapter.incident.outcome]
    if chapter.closed_ms is None:
        return words, style
    seconds = (chapter.closed_ms - chapter.opened_ms) / 1000
    later = f", {duration(seconds)} later" if 0.5 <= seconds < 1e9 else ""
    return f"{words} ({_clock(chapter.closed_ms)}{later})", style


def _source(culprit: Culprit, chapter: Chapter, entries: Sequence[Entry]) -> str:
    """The text of a line, as its armor has it, or as its file does, if that is older than the incident."""
    for patch in _patches(entries):
        if (patch.get("file"), patch.get("line"), patch.get("op")) == (culprit.file, culprit.line, culprit.op):
            return str(patch.get("text"))
    path = Path(culprit.file)
    try:
        known = path.stat()
        is_as_it_was = known.st_mtime * 1000 < chapter.opened_ms and known.st_size < _LARGEST_SOURCE
        if path.suffix != ".py" or not is_as_it_was:
            return ""
        return read_plain(path).decode("utf-8", "replace").splitlines()[culprit.line - 1].strip()
    except (OSError, ValueError, IndexError):
        return ""


def _patches(entries: Sequence[Entry]) -> list[Mapping[str, Any]]:
    """What wears armor, as it was last written down."""
    for entry in reversed(entries):
        remedies = entry.get("remedies") if entry["kind"] == REMEDIES else None
        if isinstance(remedies, Mapping) and isinstance(patches := remedies.get("armor"), list):
            return [patch for patch in patches if isinstance(patch, Mapping)]
    return []
