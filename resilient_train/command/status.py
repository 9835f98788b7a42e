"""`resilient-train status RUN_DIR`: the status of a run in a line, with its own exit code, which launchers hide."""

from __future__ import annotations

import sys

from resilient_train.command import no_run, parser_of
from resilient_train.command.terminal import print_line
from resilient_train.ground.errors import TrainError
from resilient_train.ground.types import fact
from resilient_train.ground.wording import say
from resilient_train.report.story import open_advice, read_story, verdict


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
    if story.state == "none":
        return no_run(given.run_dir)
    then = say(fact("then", things=len(open_advice(story.incidents)), process=story.process))
    print_line(f"{given.run_dir}: {': '.join(verdict(story))}{then}")
    return story.exit_code
