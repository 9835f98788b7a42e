"""An incident as a block of lines, for a person at a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from resilient_train.app.page import Page
from resilient_train.files import read_plain
from resilient_train.tracking.story import Chapter, Story
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

OUTCOMES = {
    Outcome.RECOVERED: ("recovered", "green"),
    Outcome.RECURRED: ("the same trouble came back: what was done was not enough", "yellow"),
    Outcome.UNRECOVERED: ("unrecovered: it was not over at the end of the run", "red"),
    Outcome.GAVE_UP: ("gave up", "red"),
    None: ("open: it counts as recovered once the run has stayed healthy", "yellow"),
}


def show_block(chapter: Chapter, story: Story, began_ms: int | None, page: Page) -> None:
    """Show an incident: when, what, why, the culprit, what was done, the cost, the outcome, what to do."""
    incident = chapter.incident
    anomaly, diagnosis = incident.anomaly, incident.diagnosis

    def row(label: str, text: str, style: str = "") -> None:
        text = text.strip() if style == "italic" else " ".join(text.split())
        is_narrow = page.width is not None and page.width < 60
        if not text:
            return
        if not is_narrow:
            page.line((f"{label:{_LABELS}}", "dim"), (text, style), indent=2, hang=2 + _LABELS)
        elif label:
            page.line((f"{label}: ", "dim"), (text, style), indent=2, hang=4)
        else:
            page.line((text, style), indent=4, hang=4)

    page.line()
    since = (chapter.opened_ms - began_ms) / 1000 if began_ms is not None else -1.0
    after = f" ({duration(since)} after the start)" if 0 <= since < 1e9 else ""
    when = f"incident {incident.id:,}  {_clock(chapter.opened_ms)}{after}"
    page.line((when, "bold"), f"  step {anomaly.step:,}, tick {anomaly.tick:,}", hang=2)
    row("noticed", noticed(anomaly) + reached(anomaly))
    row("", anomaly.evidence)
    row("drill", f"{incident.drill}, on purpose" if incident.drill else "")
    row("cause", str(diagnosis.cause) + (f": {rows_named(diagnosis.rows)}" if diagnosis.rows else ""))
    for label, culprit in (("culprit", diagnosis.culprit), ("then", diagnosis.symptom)):
        if culprit is not None:
            row(label, describe_culprit(culprit))
            row("", _source(culprit, chapter, story), style="italic")
    if incident.decision.gave_up is not None:
        row("cure", f"gave up: {why_of(incident)}")
    elif chapter.treated_ms is None and incident.outcome is None:
        row("cure", "being treated")
    else:
        row("cure", remedies_of(incident) or "nothing was done")
    row("cost", describe_cost(incident))
    outcome, style = OUTCOMES[incident.outcome]
    if chapter.closed_ms is not None:
        seconds = (chapter.closed_ms - chapter.opened_ms) / 1000
        later = f", {duration(seconds)} later" if 0.5 <= seconds < 1e9 else ""
        outcome = f"{outcome} ({_clock(chapter.closed_ms)}{later})"
    row("outcome", outcome, style)
    row("advice", diagnosis.advice)


def _clock(ms: int) -> str:
    with suppress(ValueError, OverflowError, OSError):  # a damaged journal may have any number
        return f"{datetime.fromtimestamp(ms / 1000):%Y-%m-%d %H:%M:%S}"
    return "at an unknown time"


def _source(culprit: Culprit, chapter: Chapter, story: Story) -> str:
    """Return the text of a line, from its active patch, or from its file if that is older than the incident."""
    patches = (story.remedies or {}).get("armor")
    for patch in patches if isinstance(patches, list) else []:
        place = culprit.file, culprit.line, culprit.op
        if isinstance(patch, Mapping) and (patch.get("file"), patch.get("line"), patch.get("op")) == place:
            return str(patch.get("text"))
    path = Path(culprit.file)
    try:
        known = path.stat()
        is_unchanged = known.st_mtime * 1000 < chapter.opened_ms and known.st_size < _LARGEST_SOURCE
        if path.suffix != ".py" or not is_unchanged:
            return ""
        return read_plain(path).decode("utf-8", "replace").splitlines()[culprit.line - 1].strip()
    except (OSError, ValueError, IndexError):
        return ""
