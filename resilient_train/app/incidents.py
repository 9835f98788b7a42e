"""`resilient-train incidents RUN_DIR`: whether a run is all right, and its incidents.

It reads what the run has written, also while the run is at work, and changes nothing.
"""

from __future__ import annotations

import io
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient_train.app import parser_of
from resilient_train.app.directory import launcher_of
from resilient_train.app.status import Status, status_of
from resilient_train.app.terminal import Words, print_line
from resilient_train.errors import TrainError
from resilient_train.record.incident_lines import as_line
from resilient_train.record.journal import JOURNAL, damaged_lines
from resilient_train.tracking.report import LABELS, facts, heading
from resilient_train.tracking.review import to_change, verdict
from resilient_train.tracking.story import Chapter, Story, read_story
from resilient_train.types import Outcome
from resilient_train.wording import OUTCOMES, counted, noticed

_LOOK_EVERY_S = 1.0
_RESTARTS_WITHIN_S = 120.0  # by a launcher, which may be on another host and cannot be seen then

_STYLES = {"clean": "bold green", "recovered": "bold green", "gave_up": "bold red", "failed": "bold red"}
_STYLES |= {
    "unrecovered": "bold red",
    "no_progress": "bold yellow",
    "above_best": "bold yellow",
    "observed": "bold yellow",
}

_OUTCOMES = {
    Outcome.RECOVERED: "green",
    Outcome.RECURRED: "yellow",
    Outcome.UNRECOVERED: "red",
    Outcome.GAVE_UP: "red",
    Outcome.OBSERVED: "yellow",
    None: "yellow",
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
            style = "bold yellow"
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
                self.line(name, (OUTCOMES[incident.outcome], _OUTCOMES[incident.outcome]))
            elif is_live and chapter.treated_ms is None and incident.outcome is None:
                if incident.id not in self.named:
                    self.line(name, f"{noticed(incident.anomaly)} at step {incident.anomaly.step:,}; being treated")
                self.named.add(incident.id)
                continue
            else:
                _show_block(chapter, found.story)
            self.known[incident.id] = now


def _show_block(chapter: Chapter, story: Story) -> None:
    """Show an incident: when it was, and the facts about it."""
    print_line()
    when, where = heading(chapter, story)
    print_line((when, "bold"), where)
    for label, words in facts(chapter, story, reads_source=True):
        style = _OUTCOMES[chapter.incident.outcome] if label == "outcome" else ""
        print_line((f"{label:{LABELS}}", "dim"), (words, style), indent=2)
