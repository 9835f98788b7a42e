"""The door to where a run stands: `python -m resilient_train status RUN_DIR`.

It changes nothing, needs neither torch nor the run's code, and ends with the run's own exit code, of which launchers
make another one. 0 is also said of a run that is at work, 1 of one that was killed, 2 where there is no run.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from resilient_train.record.endings import (
    REFUSED,
    SUMMARY,
    at_work,
    failure,
    is_run,
    last_good_of,
    loop_of,
    next_directory,
    read_ending,
    why_incomplete,
)
from resilient_train.record.progress import planned_steps, position_of
from resilient_train.tracking.review import near
from resilient_train.wording import printable

_NOT_WELL = {
    "unrecovered": "not recovered, an incident was not over at the end of the run",
    "no_progress": "the loss did not fall",
}


@dataclass(frozen=True)
class Status:
    """Where a run stands, and why if that is known."""

    state: str  # running, killed, refused, none; else as summary.json has it
    exit_code: int
    step: int | None = None  # accepted updates
    steps: int | None = None  # planned
    process: str | None = None  # that is at work
    why: str | None = None
    onward: str = "the same command resumes"

    def line(self, run_dir: Path) -> str:
        """Tell it in one line."""
        of = f" of {self.steps:,}" if self.steps is not None else ""
        at = f"step {self.step or 0:,}{of}"
        because = f": {self.why}" if self.why else ""
        match self.state:
            case "running":
                return f"{run_dir}: running, {at}, {self.process}"
            case "completed":
                return f"{run_dir}: completed, {self.step or 0:,} steps{because}"
            case "preempted":
                return f"{run_dir}: stopped on request at {at}; {self.onward}"
            case "gave_up":
                return f"{run_dir}: {self.why or 'gave up: the end of its train.log says why'}"
            case "killed":
                return f"{run_dir}: killed (no exit message) at {at}; {self.onward}"
            case "closed":
                return f"{run_dir}: closed by its program at {at}; {self.onward}"
            case "ended":
                return f"{run_dir}: left at {at}, and nothing said that it was the end (guard.close()); {self.onward}"
            case "refused":
                return f"{run_dir}: the last start was refused{because}"
            case "none":
                return f"{run_dir}: no run there; expected the directory of a run, such as runs/NAME"
        return f"{run_dir}: {self.state} at {at}{because}"


def main(arguments: list[str] | None = None) -> int:
    """Print where a run stands; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="resilient-train status",
        description="Print in one line where a run stands, and end with its exit code.",
        epilog="0 finished, or at work; 1 failed, hung or killed; 2 refused, or no run there; 3 gave up; 75 stopped on "
        "request: the same command resumes.",
    )
    parser.add_argument("run_dir", type=Path, help="the directory of the run")
    parser.add_argument("--json", action="store_true", help="print an object for a program instead")
    given = parser.parse_args(arguments)
    status = status_of(given.run_dir)
    if given.json:
        print(json.dumps({"run_dir": str(given.run_dir), **asdict(status)}))
    else:
        print(printable(status.line(given.run_dir)), file=sys.stderr if status.state == "none" else sys.stdout)
    return status.exit_code


def status_of(run_dir: Path) -> Status:
    """Look where a run stands."""
    found, loop = _found(run_dir), loop_of(run_dir)
    if loop is None or loop.resumes:
        return found
    return replace(found, onward=f"running it again starts a new run in {next_directory(run_dir)}")


def _found(run_dir: Path) -> Status:
    stand, steps = position_of(run_dir), planned_steps(run_dir)
    step = stand.step if stand else None
    if process := at_work(run_dir):
        return Status("running", 0, step, steps, process)
    if refused := read_ending(run_dir, REFUSED):
        return Status("refused", refused["exit_code"], step, steps, why=str(refused.get("why")))
    if summary := read_ending(run_dir, SUMMARY):
        return _ended(run_dir, summary, steps)
    if not is_run(run_dir):
        return Status("none", 2)
    why = failure(run_dir)
    return Status("failed" if why else "killed", 1, step, steps, why=why)


def _ended(run_dir: Path, summary: dict[str, Any], steps: int | None) -> Status:
    """What a run said of its end."""
    state, step = str(summary.get("status")), summary.get("steps")
    why = None
    if state in ("failed", "gave_up"):
        why = why_incomplete(run_dir, summary)
    if state == "completed":
        why = _NOT_WELL.get(str(summary.get("verdict")))
    if why is not None and state == "gave_up" and (good := last_good_of(run_dir)) is not None:
        why = f"{why}; the last good state is in {near(good.path)}"
    return Status(state, summary["exit_code"], step if isinstance(step, int) else None, steps, why=why)
