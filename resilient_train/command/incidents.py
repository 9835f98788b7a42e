"""`resilient-train incidents RUN_DIR`: whether a run is all right, and its incidents, also while it is at work."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from resilient_train.command import no_run, parser_of
from resilient_train.command.terminal import print_line
from resilient_train.durable.journal import JOURNAL
from resilient_train.durable.run_history import in_words
from resilient_train.ground.errors import TrainError
from resilient_train.ground.types import Outcome, fact
from resilient_train.ground.wording import describe, lines_of, say
from resilient_train.report.story import Story, read_story, review

_LOOK_EVERY_S = 1.0


def main(words: list[str]) -> int:
    parser = parser_of(
        "incidents",
        "Print whether a run is all right, and its incidents, the oldest first.",
        "0 printed; 1 the journal cannot be read; 2 no run there. With --follow: the exit code of the run.",
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON for each, as in incidents.jsonl")
    parser.add_argument("--follow", action="store_true", help="print new incidents until the run has ended")
    given = parser.parse_args(words)
    try:
        return _show(given.run_dir, as_json=given.json, follows=given.follow)
    except TrainError as error:
        print(error, file=sys.stderr)
        return 1


def _show(run_dir: Path, *, as_json: bool, follows: bool) -> int:
    """Show a run, and while it `follows` new incidents, until its process has ended."""
    story = read_story(run_dir)
    if story.state == "none" and not (run_dir / JOURNAL).exists():
        return no_run(run_dir)
    if not as_json:
        _print_summary(story)
    known: dict[int, Outcome | None] = {}  # the outcomes of incidents when they were shown
    while True:
        _print_news(story, known, as_json=as_json, follows=follows)
        if not follows or not story.process:
            break
        time.sleep(_LOOK_EVERY_S)
        story = read_story(run_dir)
    if follows and not as_json:
        _print_summary(story)
    return story.exit_code if follows and story.state != "none" else 0  # of a loop without a run's files it is unknown


def _print_summary(story: Story) -> None:
    first, *lines = review(story)
    running = say(fact("running", process=story.process)) if story.process else ""
    for line in [first + running, *lines]:
        print_line(line)


def _print_news(story: Story, known: dict[int, Outcome | None], *, as_json: bool, follows: bool) -> None:
    """Show each incident, to who follows once it was treated, and its outcome when that is known."""
    for incident in story.incidents:
        is_known = incident.id in known
        is_being_treated = bool(story.process) and incident.id not in story.treated and incident.outcome is None
        if (is_being_treated and follows) or (is_known and known[incident.id] is incident.outcome):
            continue
        known[incident.id] = incident.outcome
        if as_json:
            print(json.dumps(in_words(incident)), flush=True)
        else:
            for line in [describe(incident, "outcome")] if is_known else ["", *lines_of(incident, "block")]:
                print_line(line)
