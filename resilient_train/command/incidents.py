"""`resilient-train incidents RUN_DIR`: whether a run is all right, and its incidents, also while it is at work."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from resilient_train.command import no_run, parser_of
from resilient_train.command.terminal import print_line
from resilient_train.durable.endings import LAUNCH
from resilient_train.durable.journal import JOURNAL
from resilient_train.durable.run_history import in_words
from resilient_train.ground.errors import TrainError
from resilient_train.ground.types import Outcome, fact
from resilient_train.ground.wording import describe, say
from resilient_train.report.story import Story, block, read_story, review, verdict

_LOOK_EVERY_S = 1.0
_RESTARTS_WITHIN_S = 120.0  # by a launcher, which cannot be seen from here

# Of a status and of an outcome.
_COLOURS = {"clean": "green", "recovered": "green", "gave_up": "red", "failed": "red", "unrecovered": "red"}


def _colour(word: str | None) -> str:
    return _COLOURS.get(word or "", "yellow")


def main(words: list[str]) -> int:
    parser = parser_of(
        "incidents",
        "Print whether a run is all right, and its incidents, the oldest first.",
        "0 printed; 1 the journal cannot be read; 2 no run there. With --follow: the exit code of the run.",
        json="one line of JSON for each, as in incidents.jsonl",
    )
    parser.add_argument("--follow", action="store_true", help="print new incidents until the run has ended")
    parser.add_argument("--last", type=int, metavar="N", help="only the last N")
    given = parser.parse_args(words)
    run_dir: Path = given.run_dir
    try:
        story = _read(run_dir)
        if story.state == "none" and not (run_dir / JOURNAL).exists():
            return no_run(run_dir)
        shown = _Shown(as_json=given.json, follows=given.follow)
        shown.summary(story)
        shown.news(story, given.last)
        return _follow(run_dir, shown, story) if given.follow else 0
    except TrainError as error:
        print(error, file=sys.stderr)
        return 1


def _read(run_dir: Path) -> Story:
    try:
        return read_story(run_dir)
    except OSError as error:
        raise TrainError(f"{run_dir / JOURNAL} cannot be read: {error.strerror or error}") from error


def _follow(run_dir: Path, shown: _Shown, story: Story) -> int:
    """Show new incidents until the run has ended and nothing could restart it any more; return its exit code."""
    first, running_at = story, time.monotonic()
    # Between two processes of a run none is at work for a moment: a kill has to be seen twice.
    patience_s = _RESTARTS_WITHIN_S if (run_dir / LAUNCH).is_file() else 2 * _LOOK_EVERY_S
    while story.process or (story.state in ("killed", "failed") and time.monotonic() - running_at < patience_s):
        if story.process:
            running_at = time.monotonic()
        time.sleep(_LOOK_EVERY_S)
        story = _read(run_dir)
        shown.news(story)
    if story != first:
        shown.summary(story)
    return story.exit_code if story.state != "none" else 0  # of a loop without a run's files it is unknown


class _Shown:
    """What was shown of a run: blocks of lines for a person, or a line of JSON for each incident and each change."""

    def __init__(self, *, as_json: bool, follows: bool) -> None:
        self.as_json, self.follows = as_json, follows
        self.known: dict[int, Outcome | None] = {}  # the outcomes of incidents when they were shown

    def summary(self, story: Story) -> None:
        if self.as_json:
            return
        words, sentences = verdict(story)
        running = say(fact("running", process=story.process)) if story.process else ""
        print_line((f"{words}: ", f"bold {_colour(story.status)}"), sentences + running)
        for line in review(story)[1:]:
            print_line(line)

    def news(self, story: Story, last: int | None = None) -> None:
        """Show each incident, with --follow once it was treated, and its outcome when that is known."""
        before = 0 if last is None else max(0, len(story.chapters) - max(0, last))
        if before and not self.as_json:
            print_line(say(fact("older", count=before)))
        self.known |= {one.incident.id: one.incident.outcome for one in story.chapters[:before]}
        for chapter in story.chapters:
            incident = chapter.incident
            is_known = incident.id in self.known
            is_being_treated = bool(story.process) and chapter.treated_ms is None and incident.outcome is None
            if (is_being_treated and self.follows) or (is_known and self.known[incident.id] is incident.outcome):
                continue
            self.known[incident.id] = incident.outcome
            if self.as_json:
                print(json.dumps(in_words(incident)), flush=True)
            elif is_known:
                print_line((describe(incident, "outcome"), _colour(incident.outcome)))
            else:
                first, *lines, outcome = block(chapter)
                print_line()
                print_line((first, "bold"))
                for line in lines:
                    print_line(line)
                print_line((outcome, _colour(incident.outcome)))
