"""The door to what happened: `python -m resilient_train incidents RUN_DIR`.

It reads what the run has written, also while that is at work, and changes nothing.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from resilient_train.app.block import outcome_in_short, show_block
from resilient_train.app.page import Page
from resilient_train.app.status import Status, status_of
from resilient_train.record.directory import launcher_of
from resilient_train.record.incident_lines import as_line
from resilient_train.record.journal import JOURNAL, Entry, damaged_lines, read
from resilient_train.tracking.review import next_start, verdict
from resilient_train.tracking.story import Chapter, Story, read_story
from resilient_train.types import Outcome
from resilient_train.wording import (
    counted,
    noticed,
    printable,
)

_LOOK_EVERY_S = 1.0
_STARTED_AGAIN = ("killed", "failed")  # by a launcher
_RESTARTS_WITHIN_S = 120.0  # where nobody can see whether there still is one

_STYLES = {"clean": "bold green", "recovered": "bold green", "gave_up": "bold red", "failed": "bold red"}
_STYLES |= {"unrecovered": "bold red", "no_progress": "bold yellow"}


def main(arguments: list[str] | None = None) -> int:
    """Print the incidents of a run; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="resilient-train incidents",
        description="Print whether a run is all right, and its incidents, the oldest first.",
        epilog="0 printed; 1 the journal cannot be read; 2 no run there. With --follow: the exit code of the run.",
    )
    parser.add_argument("run_dir", type=Path, help="the directory of the run")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each, as in incidents.jsonl")
    parser.add_argument("--follow", action="store_true", help="go on with what comes, until the run has ended")
    parser.add_argument("--last", type=int, metavar="N", help="only the last N")
    given = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an old terminal shall not end it
    run_dir: Path = given.run_dir
    status = status_of(run_dir)
    if status.state == "none" and not (run_dir / JOURNAL).exists():
        print(printable(status.line(run_dir)), file=sys.stderr)
        return 2
    show = _Lines() if given.json else _Blocks()
    try:
        if given.follow:
            return _follow(run_dir, show, given.last)
        found = _Read.of(run_dir, status)
        show.verdict(found)
        show.news(found, given.last)
    except _Unreadable as why:
        print(printable(str(why)), file=sys.stderr)
        return 1
    return 0


def _follow(run_dir: Path, show: _Lines | _Blocks, last: int | None) -> int:
    """Show what comes, until the run has ended and nobody is left who would start it again; return its exit code."""
    before, since, waits_for = None, time.monotonic(), ""
    while True:
        status = status_of(run_dir)  # first: what the run has written before its end is in the journal then
        found = _Read.of(run_dir, status)
        if before is None:
            show.verdict(found)
        show.news(found, last if before is None else None, is_live=True)
        if status.state == "running":
            if waits_for:
                show.line(f"it goes on: {status.process}")
            since, waits_for = time.monotonic(), ""
        elif (who := _waited_for(run_dir, status, time.monotonic() - since)) is None:
            break
        elif who != waits_for:
            waits_for = who
            show.line(f"its process has gone; waits for {who} to start it again")
        before = status
        time.sleep(_LOOK_EVERY_S)
    show.news(found, None)
    if before is not None:
        show.verdict(found)
    return status.exit_code if status.state != "none" else 0  # of a loop of one's own nobody knows it


def _waited_for(run_dir: Path, status: Status, gone_s: float) -> str | None:
    """Who is about to start a run again that has not worked for so long; empty while it is too early to say."""
    if status.state not in _STARTED_AGAIN:
        return None
    if (launcher := launcher_of(run_dir)) is not None and (launcher.is_seen or gone_s < _RESTARTS_WITHIN_S):
        return launcher.name
    # Between two processes of a run nobody is at work for a moment: a kill is looked at twice.
    return "" if status.state == "killed" and gone_s < 2 * _LOOK_EVERY_S else None


class _Unreadable(Exception):
    """There is a journal, and it cannot be read."""


@dataclass(frozen=True)
class _Read:
    """What a run directory says at a moment."""

    story: Story
    status: Status
    entries: Sequence[Entry]
    damaged: int

    @classmethod
    def of(cls, run_dir: Path, status: Status) -> _Read:
        journal = run_dir / JOURNAL
        try:
            return cls(read_story(run_dir), status, read(journal), damaged_lines(journal))
        except OSError as error:
            raise _Unreadable(f"{journal} cannot be read: {error.strerror or error}") from error


@dataclass
class _Lines:
    """JSON, one line for each incident and for each time that it changes."""

    shown: dict[int, str] = field(default_factory=dict)

    def verdict(self, found: _Read) -> None: ...

    def line(self, words: str) -> None: ...

    def news(self, found: _Read, last: int | None, *, is_live: bool = False) -> None:
        left = len(found.story.chapters) - len(_newest(found.story.chapters, last))
        for number, chapter in enumerate(found.story.chapters):
            text = json.dumps(as_line(chapter.incident))
            if number >= left and self.shown.get(chapter.incident.id) != text:
                print(text, flush=True)
            self.shown[chapter.incident.id] = text


@dataclass
class _Blocks:
    """A block of lines for each incident, for a person."""

    page: Page = field(default_factory=Page)
    shown: dict[int, Outcome | None] = field(default_factory=dict)  # in full, and with which outcome
    named: set[int] = field(default_factory=set)  # that are being treated

    def verdict(self, found: _Read) -> None:
        """Say first whether the run is all right."""
        words, style, sentences = _verdict(found)
        self.page.line((f"{words}: ", style), sentences, hang=2)
        if found.damaged:
            lines = "1 line of it is" if found.damaged == 1 else f"{found.damaged:,} lines of it are"
            self.page.line((f"{JOURNAL}: {lines} damaged and left out", "yellow"), hang=2)

    def line(self, words: str) -> None:
        """Say something that no incident has to do with."""
        self.page.line((words, "dim"), hang=2)

    def news(self, found: _Read, last: int | None, *, is_live: bool = False) -> None:
        """Show each incident once; of a live run when it was treated, and what became of it when that is known."""
        chapters = _newest(found.story.chapters, last)
        if left := len(found.story.chapters) - len(chapters):
            self.page.line(f"{counted(left, 'incident')} before these", hang=2)
            self.shown |= {one.incident.id: one.incident.outcome for one in found.story.chapters[:left]}
        for chapter in found.story.chapters:
            incident = chapter.incident
            name = f"incident {incident.id:,}: "
            if incident.id in self.shown:
                if self.shown[incident.id] is not incident.outcome:
                    self.page.line(name, outcome_in_short(incident.outcome), hang=2)
            elif is_live and chapter.treated_ms is None and incident.outcome is None:
                if incident.id not in self.named:
                    self.page.line(
                        name, f"{noticed(incident.anomaly)} at step {incident.anomaly.step:,}; being treated"
                    )
                self.named.add(incident.id)
                continue
            else:
                show_block(chapter, found.entries, self.page)
            self.shown[incident.id] = incident.outcome


def _newest(chapters: Sequence[Chapter], last: int | None) -> Sequence[Chapter]:
    return chapters if last is None else chapters[len(chapters) - min(max(0, last), len(chapters)) :]


def _verdict(found: _Read) -> tuple[str, str, str]:
    """In a few words, in which style, and the sentences behind them."""
    story, state = found.story, found.status.state
    words, sentences = verdict(story)
    if state == "killed":
        _, sentences = verdict(replace(story, why=""))
        return "Killed (no exit message)", "bold yellow", f"{sentences} The same command {_goes_on(story)}."
    if state == "refused":
        return "The last start was refused", "bold yellow", f"{found.status.why}. Before that, {sentences}"
    if state == "running":
        sentences = f"{sentences} Running, {found.status.process}."
    return words, _STYLES.get(story.status, "bold yellow"), sentences


def _goes_on(story: Story) -> str:
    return next_start(story).rpartition(" it ")[2]  # without what is said of a run that may be at work
