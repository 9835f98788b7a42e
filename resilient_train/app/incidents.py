"""`resilient-train incidents RUN_DIR`: whether a run is all right, and its incidents.

It reads what the run has written, also while the run is at work, and changes nothing.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from resilient_train.app import parser_of
from resilient_train.app.directory import launcher_of
from resilient_train.app.status import Status, status_of
from resilient_train.app.terminal import Words, print_line
from resilient_train.errors import TrainError
from resilient_train.files import read_plain
from resilient_train.record.incident_lines import as_line
from resilient_train.record.journal import JOURNAL, damaged_lines
from resilient_train.tracking.report import IncidentView
from resilient_train.tracking.review import next_start, to_change, verdict
from resilient_train.tracking.story import Chapter, Story, read_story
from resilient_train.types import Culprit, Outcome
from resilient_train.wording import OUTCOMES, counted, duration, noticed, reached_suffix

_LOOK_EVERY_S = 1.0
_RESTARTS_WITHIN_S = 120.0  # by a launcher, which may be on another host and cannot be seen then

_STYLES = {"clean": "bold green", "recovered": "bold green", "gave_up": "bold red", "failed": "bold red"}
_STYLES |= {
    "unrecovered": "bold red",
    "no_progress": "bold yellow",
    "above_best": "bold yellow",
    "observed": "bold yellow",
}

_LARGEST_SOURCE = 2**22  # bytes
_LABELS = 9  # columns

_OUTCOMES = {
    Outcome.RECOVERED: ("recovered", "green"),
    Outcome.RECURRED: (f"{OUTCOMES[Outcome.RECURRED]}: what was done was not enough", "yellow"),
    Outcome.UNRECOVERED: (f"{OUTCOMES[Outcome.UNRECOVERED]}: it was not over at the end of the run", "red"),
    Outcome.GAVE_UP: ("gave up", "red"),
    Outcome.OBSERVED: (OUTCOMES[Outcome.OBSERVED], "yellow"),
    None: ("open: it counts as recovered once the run has stayed healthy", "yellow"),
}


def main(arguments: list[str] | None = None) -> int:
    """Print the incidents of a run; return the exit code."""
    parser = parser_of(
        "incidents",
        "Print whether a run is all right, and its incidents, the oldest first.",
        "0 printed; 1 the journal cannot be read; 2 no run there. With --follow: the exit code of the run.",
        json="one line of JSON for each, as in incidents.jsonl",
    )
    parser.add_argument("--follow", action="store_true", help="print new incidents until the run has ended")
    parser.add_argument("--last", type=int, metavar="N", help="only the last N")
    given = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an old terminal may lack a character
    run_dir: Path = given.run_dir
    status = status_of(run_dir)
    if status.state == "none" and not (run_dir / JOURNAL).exists():
        print(status.line(run_dir), file=sys.stderr)
        return 2
    shown = _Shown(as_json=given.json)
    try:
        if given.follow:
            return _follow(run_dir, shown, given.last)
        shown.summary(found := _read(run_dir, status))
        shown.news(found, given.last)
    except TrainError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True)
class _Found:
    """What a run directory says at a moment."""

    story: Story
    status: Status
    damaged: int  # lines of the journal


def _read(run_dir: Path, status: Status) -> _Found:
    journal = run_dir / JOURNAL
    try:
        return _Found(read_story(run_dir), status, damaged_lines(journal))
    except OSError as error:
        raise TrainError(f"{journal} cannot be read: {error.strerror or error}") from error


def _follow(run_dir: Path, shown: _Shown, last: int | None) -> int:
    """Show new incidents until the run has ended and nothing is left that could restart it; return its exit code."""
    is_first, running_at, waits_for = True, time.monotonic(), ""
    while True:
        status = status_of(run_dir)  # first: then the journal has what the run wrote before its end
        found = _read(run_dir, status)
        if is_first:
            shown.summary(found)
        shown.news(found, last if is_first else None, is_live=True)
        if status.state == "running":
            if waits_for:
                shown.line((f"the run resumed: {status.process}", "dim"))
            running_at, waits_for = time.monotonic(), ""
        elif (who := _restarted_by(run_dir, status, time.monotonic() - running_at)) is None:
            break
        elif who != waits_for:
            waits_for = who
            shown.line((f"its process ended; waiting for {who} to start it again", "dim"))
        is_first = False
        time.sleep(_LOOK_EVERY_S)
    shown.news(found, None)
    if not is_first:
        shown.summary(found, is_end=True)
    return status.exit_code if status.state != "none" else 0  # of a loop without a run's files it is unknown


def _restarted_by(run_dir: Path, status: Status, ended_s: float) -> str | None:
    """Return who will restart a run that ended so many seconds ago; empty while it is too early to say."""
    if status.state not in ("killed", "failed"):
        return None
    name, is_seen = launcher_of(run_dir)
    if name and (is_seen or ended_s < _RESTARTS_WITHIN_S):
        return name
    # Between two processes of a run none is at work for a moment: a kill has to be seen twice.
    return "" if status.state == "killed" and ended_s < 2 * _LOOK_EVERY_S else None


class _Shown:
    """What was shown of a run: blocks of lines for a person, or a line of JSON for each incident and each change."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.known: dict[int, Any] = {}  # incidents that were shown: their outcome then, or their JSON
        self.named: set[int] = set()  # incidents that are being treated

    def line(self, *words: Words) -> None:
        """Show a line that belongs to no incident."""
        if not self.as_json:
            print_line(*words)

    def summary(self, found: _Found, *, is_end: bool = False) -> None:
        """Say whether the run is all right, and list what is left to change."""
        story, state = found.story, found.status.state
        words, sentences = verdict(story)
        style = _STYLES.get(story.status, "bold yellow")
        if state == "killed":
            onward = next_start(story).rpartition(" it ")[2]  # without the words about a run that may be at work
            sentences = f"{verdict(replace(story, why=''))[1]} The same command {onward}."
            words, style = "Killed (no exit message)", "bold yellow"
        elif state == "refused":
            sentences = f"{found.status.why}. Before that, {sentences}"
            words, style = "The last start was refused", "bold yellow"
        elif state == "running":
            sentences = f"{sentences} Running, {found.status.process}."
        lines: list[tuple[Words, ...]] = [((f"{words}: ", style), sentences)]
        if found.damaged:
            damaged = "1 line of it is" if found.damaged == 1 else f"{found.damaged:,} lines of it are"
            lines.append(((f"{JOURNAL}: {damaged} damaged and left out", "yellow"),))
        changes: list[tuple[Words, ...]] = [(line,) for line in to_change(story)]
        for line in [*changes, *lines] if is_end else [*lines, *changes]:
            self.line(*line)

    def news(self, found: _Found, last: int | None, *, is_live: bool = False) -> None:
        """Show each incident once; of a live run when it was treated, and its outcome when that is known."""
        first = 0 if last is None else max(0, len(found.story.incidents) - max(0, last))
        if first:
            self.line(f"{counted(first, 'incident')} before these")
            before = found.story.incidents[:first]
            self.known |= {one.id: json.dumps(as_line(one)) if self.as_json else one.outcome for one in before}
        for chapter in found.story.chapters:
            incident, name = chapter.incident, f"incident {chapter.incident.id:,}: "
            now: Any = json.dumps(as_line(incident)) if self.as_json else incident.outcome
            is_known = incident.id in self.known
            if is_known and self.known[incident.id] == now:
                continue
            if self.as_json:
                print(now, flush=True)
            elif is_known:
                words, style = _OUTCOMES[incident.outcome]
                self.line(name, (words.partition(":")[0], style))
            elif is_live and chapter.treated_ms is None and incident.outcome is None:
                if incident.id not in self.named:
                    self.line(name, f"{noticed(incident.anomaly)} at step {incident.anomaly.step:,}; being treated")
                self.named.add(incident.id)
                continue
            else:
                _show_block(chapter, found.story)
            self.known[incident.id] = now


def _show_block(chapter: Chapter, story: Story) -> None:
    """Show an incident: when, what, why, the culprit, what was done, the cost, the outcome, what to do."""
    incident, view = chapter.incident, IncidentView.of(chapter)
    anomaly, diagnosis = incident.anomaly, incident.diagnosis

    def row(label: str, text: str, style: str = "") -> None:
        text = text.strip() if style == "italic" else " ".join(text.split())
        if text:
            print_line((f"{label:{_LABELS}}", "dim"), (text, style), indent=2)

    print_line()
    since = (chapter.opened_ms - story.began_ms) / 1000 if story.began_ms is not None else -1.0
    after = f" ({duration(since)} after the start)" if 0 <= since < 1e9 else ""
    when = f"incident {incident.id:,}  {_clock(chapter.opened_ms)}{after}"
    print_line((when, "bold"), f"  step {anomaly.step:,}, tick {anomaly.tick:,}")
    row("noticed", noticed(anomaly) + reached_suffix(incident))
    row("", anomaly.evidence)
    row("drill", f"{incident.drill}, on purpose" if incident.drill else "")
    row("cause", view.cause + (f": {view.rows}" if view.rows else ""))
    culprits = (("culprit", view.culprit, diagnosis.culprit), ("then", view.symptom, diagnosis.symptom))
    for label, words, culprit in culprits:
        if culprit is not None:
            row(label, words)
            row("", _source(culprit, chapter, story), style="italic")
    row("remedy", view.remedy)
    for place, line in enumerate(view.arms):
        print_line((f"{'' if place else 'tried':{_LABELS}}", "dim"), (line, ""), indent=2)
    row("cost", view.cost)
    outcome, style = _OUTCOMES[incident.outcome]
    if chapter.closed_ms is not None:
        seconds = (chapter.closed_ms - chapter.opened_ms) / 1000
        later = f", {duration(seconds)} later" if 0.5 <= seconds < 1e9 else ""
        outcome = f"{outcome} ({_clock(chapter.closed_ms)}{later})"
    row("outcome", outcome, style)
    row("advice", view.advice)


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
