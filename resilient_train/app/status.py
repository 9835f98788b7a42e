"""`resilient-train status RUN_DIR`: the status of a run in one line, with the run's own exit code.

It says how many incidents there were and how much is left to change. It changes nothing, and needs neither torch nor
the run's code. Launchers hide the exit code of a run; this one is true.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from resilient_train.app import NO_RUN, parser_of
from resilient_train.record.endings import (
    REFUSED,
    SUMMARY,
    at_work,
    failure,
    is_run,
    loop_of,
    read_ending,
    why_incomplete,
)
from resilient_train.record.progress import position_of
from resilient_train.tracking.review import incidents_met, near, next_directory, next_start
from resilient_train.tracking.story import last_good_of, planned_steps, read_story
from resilient_train.wording import counted, printable

_NOT_WELL = {
    "unrecovered": "not recovered, an incident was not over at the end of the run",
    "no_progress": "the loss did not fall",
    "above_best": "the loss ended far above its best level",
    "observed": "incidents were observed, not treated",
}


@dataclass(frozen=True)
class Status:
    """The status of a run, and the reason if it is known."""

    state: str  # running, killed, refused, none; else as summary.json has it
    exit_code: int
    step: int | None = None  # accepted updates
    steps: int | None = None  # planned
    process: str | None = None  # that is at work
    why: str | None = None
    onward: str = "the same command resumes"

    def line(self, run_dir: Path) -> str:
        """Return all of it in one line."""
        at = f"step {self.step or 0:,}" + (f" of {self.steps:,}" if self.steps is not None else "")
        because = f": {self.why}" if self.why else ""
        lines = {
            "running": f"running, {at}, {self.process}",
            "completed": f"completed, {counted(self.step or 0, 'step')}{because}",
            "preempted": f"stopped on request at {at}; {self.onward}",
            "gave_up": self.why or "gave up: the end of its train.log says why",
            "killed": f"killed (no exit message) at {at}; {self.onward}",
            "closed": f"closed by its program at {at}; {self.onward}",
            "ended": f"its program ended at {at} without guard.close(); {self.onward}",
            "refused": f"the last start was refused{because}",
            "none": NO_RUN,
        }
        return f"{run_dir}: {lines.get(self.state, f'{self.state} at {at}{because}')}"


def main(arguments: list[str] | None = None) -> int:
    """Print the status of a run; return its exit code."""
    codes = "0 finished, running, or closed by guard.close(); 1 failed, hung, killed, or left without guard.close();\n"
    codes += "2 refused, or no run there; 3 gave up; 75 stopped on request"
    parser = parser_of("status", "Print the status of a run in one line, and end with its exit code.", codes)
    given = parser.parse_args(arguments)
    status, story = status_of(given.run_dir), None
    with suppress(OSError):  # `incidents` says why
        story = read_story(given.run_dir)
    if story is not None and status.state in ("completed", "gave_up"):
        status = replace(status, onward=f"the same command {next_start(story)}")
    if given.json:
        known = {"incidents": len(story.incidents), "to_change": [one.text for one in story.advice]} if story else {}
        print(json.dumps({"run_dir": str(given.run_dir), **asdict(status), **known}))
    elif status.state == "none":
        print(status.line(given.run_dir), file=sys.stderr)
    else:
        line = status.line(given.run_dir)
        if story is not None and (story.incidents or status.state == "completed"):
            line += f"; {incidents_met(story)}"
        if story is not None and story.advice:
            line += f"; {counted(len(story.advice), 'thing')} to change"
        print(printable(line))
    return status.exit_code


def status_of(run_dir: Path) -> Status:
    """Read the status of the run in a directory."""
    position, steps, loop = position_of(run_dir), planned_steps(run_dir), loop_of(run_dir)
    step = position.step if position else None
    onward = "the same command resumes"
    if loop is not None and not loop.resumes:
        onward = f"running it again starts a new run in {next_directory(run_dir)}"
    if process := at_work(run_dir):
        return Status("running", 0, step, steps, process, onward=onward)
    if refused := read_ending(run_dir, REFUSED):
        return Status("refused", refused["exit_code"], step, steps, why=str(refused.get("why")), onward=onward)
    if not (summary := read_ending(run_dir, SUMMARY)):
        if not is_run(run_dir):
            return Status("none", 2, onward=onward)
        why = failure(run_dir)
        return Status("failed" if why else "killed", 1, step, steps, why=why, onward=onward)
    state, step = str(summary.get("status")), summary.get("steps")
    why = _NOT_WELL.get(str(summary.get("verdict"))) if state == "completed" else None
    if state in ("failed", "gave_up"):
        why = why_incomplete(run_dir, summary)
    if why is not None and state == "gave_up" and (good := last_good_of(run_dir)) is not None:
        why = f"{why}; the last good state is in {near(good.path)}"
    step = step if isinstance(step, int) else None
    return Status(state, summary["exit_code"], step, steps, why=why, onward=onward)
