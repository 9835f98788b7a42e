"""`resilient-train status RUN_DIR`: the status of a run in a line, with its own exit code, which launchers hide."""

from __future__ import annotations

import json
import sys

from resilient_train.command import no_run, parser_of
from resilient_train.command.terminal import print_line
from resilient_train.ground.errors import TrainError
from resilient_train.ground.secrets import masked_tree
from resilient_train.ground.types import fact
from resilient_train.ground.wording import say
from resilient_train.report.story import Story, next_start, read_story, verdict


def main(words: list[str]) -> int:
    codes = "0 finished, running, or closed by guard.close(); 1 failed, hung, killed, or left without guard.close();\n"
    codes += "2 refused, or no run there; 3 gave up; 75 stopped on request"
    parser = parser_of("status", "Print the status of a run in one line, and end with its exit code.", codes)
    given = parser.parse_args(words)
    try:
        story = read_story(given.run_dir)
    except TrainError as error:
        print(error, file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps(masked_tree({"run_dir": str(given.run_dir), **known_of(story)})))
    elif story.state == "none":
        return no_run(given.run_dir)
    else:
        print_line(f"{given.run_dir}: {line_of(story)}")
    return story.exit_code


def line_of(story: Story) -> str:
    onward = () if story.process or story.is_complete else next_start(story)
    return ": ".join(verdict(story)) + say(fact("then", things=len(story.advice), process=story.process, next=onward))


def known_of(story: Story) -> dict[str, object]:
    return {
        "state": "refused" if story.refused else "running" if story.process else story.state,
        "status": story.status,
        "exit_code": story.exit_code,
        "step": story.step,
        "steps": story.steps,
        "process": story.process,
        "why": story.refused or story.why or None,
        "onward": say(fact("the_command", next=next_start(story))),
        "incidents": len(story.incidents),
        "to_change": [say(one.facts) for one in story.advice],
    }
