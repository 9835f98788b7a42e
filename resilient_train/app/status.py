"""`resilient-train status RUN_DIR`: the status of a run in one line, with the run's own exit code.

It changes nothing, and needs neither torch nor the run's code. Launchers hide the exit code of a run; this one is true.
"""

from __future__ import annotations

import json
import sys

from resilient_train.app import NO_RUN, parser_of
from resilient_train.record.endings import Ending, ending_of
from resilient_train.record.journal import JOURNAL
from resilient_train.secrets import masked, masked_tree
from resilient_train.tracking.review import next_start, verdict
from resilient_train.tracking.story import Story, read_story
from resilient_train.wording import counted, printable


def main(arguments: list[str] | None = None) -> int:
    """Print the status of a run; return its exit code."""
    codes = "0 finished, running, or closed by guard.close(); 1 failed, hung, killed, or left without guard.close();\n"
    codes += "2 refused, or no run there; 3 gave up; 75 stopped on request"
    parser = parser_of("status", "Print the status of a run in one line, and end with its exit code.", codes)
    given = parser.parse_args(arguments)
    try:
        story = read_story(given.run_dir)
    except OSError as error:
        ending = ending_of(given.run_dir)
        why = f"{JOURNAL} cannot be read: {error.strerror or error}"
        if given.json:
            known = {"state": _state_of(ending), "exit_code": ending.exit_code, "why": why}
            print(json.dumps(masked_tree({"run_dir": str(given.run_dir), **known})))
        else:
            print(printable(masked(f"{given.run_dir}: {ending.state}; {why}")))
        return ending.exit_code
    if given.json:
        print(json.dumps(masked_tree({"run_dir": str(given.run_dir), **known_of(story)})))
    elif story.state == "none":
        print(f"{given.run_dir}: {NO_RUN}", file=sys.stderr)
    else:
        print(printable(masked(f"{given.run_dir}: {line_of(story)}")))
    return story.exit_code


def line_of(story: Story) -> str:
    """Say in one line how a run fares, and how much is left to change."""
    line = ": ".join(verdict(story))
    if story.advice:
        line += f" {counted(len(story.advice), 'thing')} to change."
    if story.process:
        return f"{line} Running, {story.process}."
    return line if story.is_complete else f"{line} The same command {next_start(story)}."


def known_of(story: Story) -> dict[str, object]:
    """Return the status for programs."""
    return {
        "state": _state_of(story),
        "status": story.status,
        "exit_code": story.exit_code,
        "step": story.step,
        "steps": story.steps,
        "process": story.process,
        "why": story.refused or story.why or None,
        "onward": f"the same command {next_start(story)}",
        "incidents": len(story.incidents),
        "to_change": [*story.advice],
    }


def _state_of(found: Ending) -> str:
    return "refused" if found.refused else "running" if found.process else found.state
