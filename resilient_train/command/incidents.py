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
from resilient_train.report.story import Story, block, read_story, review

_LOOK_EVERY_S = 1.0
_RESTARTS_WITHIN_S = 120.0  # by a launcher, which cannot be seen from here


def main(words: list[str]) -> int:
    parser = parser_of(
        "incidents",
        "Print whether a run is all right, and its incidents, the oldest first.",
        "0 printed; 1 the journal cannot be read; 2 no run there. With --follow: the exit code of the run.",
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON for each, as in incidents.jsonl")
    parser.add_argument("--follow", action="store_true", help="print new incidents until the run has ended")
    given = parser.parse_args(words)
    run_dir: Path = given.run_dir
    try:
        story = read_story(run_dir)
        if story.state == "none" and not (run_dir / JOURNAL).exists():
            return no_run(run_dir)
        shown = _Shown(as_json=given.json, follows=given.follow)
        shown.summary(story)
        shown.news(story)
        return _follow(run_dir, shown, story) if given.follow else 0
    except TrainError as error:
        print(error, file=sys.stderr)
        return 1


def _follow(run_dir: Path, shown: _Shown, story: Story) -> int:
    """Show new incidents until the run has ended and nothing could restart it any more; return its exit code."""
    first, running_at = story, time.monotonic()
    # Between two processes of a run none is at work for a moment: a kill has to be seen twice.
    patience_s = _RESTARTS_WITHIN_S if (run_dir / LAUNCH).is_file() else 2 * _LOOK_EVERY_S
    while story.process or (story.state in ("killed", "failed") and time.monotonic() - running_at < patience_s):
        if story.process:
            running_at = time.monotonic()
        time.sleep(_LOOK_EVERY_S)
        story = read_story(run_dir)
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
        first, *lines = review(story)
        running = say(fact("running", process=story.process)) if story.process else ""
        for line in [first + running, *lines]:
            print_line(line)

    def news(self, story: Story) -> None:
        """Show each incident, with --follow once it was treated, and its outcome when that is known."""
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
                print_line(describe(incident, "outcome"))
            else:
                for line in ["", *block(chapter)]:
                    print_line(line)
