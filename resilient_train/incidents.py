"""The door to what happened: `python -m resilient_train.incidents RUN_DIR`.

It reads the journal, also of a run that is at work, and changes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from resilient_train.events import Incident
from resilient_train.record.incidents import as_line, outcome_told, recalled, told
from resilient_train.record.journal import JOURNAL, read

_LOOK_EVERY_S = 1.0


def main(arguments: list[str] | None = None) -> int:
    """Print the incidents of a run; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m resilient_train.incidents", description="Print the incidents of a run, the oldest first."
    )
    parser.add_argument("run_dir", type=Path, help="the directory of the run")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each, as in incidents.jsonl")
    parser.add_argument("--follow", action="store_true", help="go on with what comes, until interrupted")
    given = parser.parse_args(arguments)
    if not given.run_dir.is_dir():
        print(f"{given.run_dir} is no directory: the directory of a run is wanted, such as runs/NAME", file=sys.stderr)
        return 2
    incidents = _incidents(given.run_dir)
    shown: dict[int, str] = {}
    _show(incidents, shown, as_json=given.json)
    if not incidents and not given.follow and not given.json:
        print("no incidents")
    while given.follow:
        time.sleep(_LOOK_EVERY_S)
        _show(_incidents(given.run_dir), shown, as_json=given.json)
    return 0


def _incidents(run_dir: Path) -> list[Incident]:
    """All of them as they stand, the open ones included."""
    return recalled(read(run_dir / JOURNAL)) if (run_dir / JOURNAL).exists() else []


def _show(incidents: list[Incident], shown: dict[int, str], *, as_json: bool) -> None:
    """Print what is new, or has changed since it was shown."""
    for incident in incidents:
        text = json.dumps(as_line(incident)) if as_json else "\n".join(_lines(incident))
        if shown.get(incident.id) != text:
            shown[incident.id] = text
            print(text, flush=True)


def _lines(incident: Incident) -> Iterator[str]:
    yield f"incident {incident.id:,} at tick {incident.anomaly.tick:,}"
    yield f"  {told(incident)}".replace("\n", "\n  ")
    if not incident.diagnosis.culprit and not incident.diagnosis.rows and incident.diagnosis.advice:
        yield f"    advice: {incident.diagnosis.advice}"
    yield f"  {outcome_told(incident)}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(0)
