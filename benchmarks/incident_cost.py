"""What an incident costs: how long its diagnosis, its trial and its remedy take, in steps of the run that it is in.

The programs and faults are those of `python -m clinic matrix`, with a guard. The phases of each incident are those
of its journal (in whole milliseconds); a step is the median time from one update to the next in the same run. Trials
are shown with the updates that they made.

    python benchmarks/incident_cost.py --json costs.json
    python benchmarks/incident_cost.py --families leap weights --recovery aggressive
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from interleaved import machine, table

sys.path.insert(0, str(Path(__file__).parents[1]))

from clinic.matrix import drawn
from clinic.matrix_faults import FAMILIES
from clinic.matrix_loops import Job, Kit, ended, started_worker

PHASES = ("diagnose", "decide", "remedy", "rewind", "resume")


@dataclass(frozen=True)
class Cost:
    """Of one incident: seconds by phase, and a step of its run."""

    family: str
    program: str
    signal: str
    step_s: float
    seconds: dict[str, float]
    tried: int  # arms of a trial

    def steps(self, phase: str) -> float:
        return self.seconds.get(phase, 0.0) / self.step_s


def measured(job: Job, family: str) -> tuple[list[Cost], dict[str, int]]:
    """Run one guarded loop; return the cost of its incidents, and its updates: accepted, and made by trials."""
    with TemporaryDirectory(prefix="incident-cost-", ignore_cleanup_errors=True) as folder:
        run_dir, moments = Path(folder, "run"), [time.perf_counter()]
        kit = Kit(job, run_dir)
        after = kit.injector.after

        def noted() -> None:
            after()
            moments.append(time.perf_counter())

        kit.injector.after = noted  # type: ignore[method-assign]
        ended(job, kit, run_dir)
        entries = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text("utf-8").splitlines()]
        summary = json.loads((run_dir / "summary.json").read_text("utf-8"))
    step_s = statistics.median(late - early for early, late in itertools.pairwise(moments))
    costs = []
    phases: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for entry in entries:
        if entry["kind"] == "incident_treated":
            own = phases[entry["incident"]["id"]]
            for name, began, end in entry.get("phases") or ():  # none where an incident continues
                own[name] += (end - began) / 1e3
        elif entry["kind"] == "incident_phase":
            name, began, end = entry["phase"]
            phases[entry["number"]][name] += (end - began) / 1e3
    closed = {entry["incident"]["id"]: entry["incident"] for entry in entries if entry["kind"] == "incident_closed"}
    for number, seconds in phases.items():
        incident: dict[str, Any] = closed.get(number, {})
        tried = len(incident.get("tried") or ())
        signal = str(incident.get("signal", "?"))
        costs.append(Cost(family, f"{job.recipe}, {job.optimizer}", signal, step_s, dict(seconds), tried))
    return costs, {"updates": summary.get("steps", 0), "trial_updates": summary.get("trial_updates", 0)}


def main() -> None:
    """Measure, and print a table by family of faults and one over all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--recovery", default="balanced", help="the policy (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another one draws other runs (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args()
    started_worker()
    origin, costs, updates = machine(), list[Cost](), dict[str, dict[str, int]]()
    print(", ".join(f"{name} {value}" for name, value in origin.items()), flush=True)
    for run in drawn(given.seed):
        if not run.is_faulty or run.family not in given.families:
            continue
        about = (run.number, run.recipe, run.optimizer, run.seed, "guarded", run.fault, run.hands_over)
        found, made = measured(Job(*about, recovery=given.recovery), run.family)
        costs += found
        updates[str(run)] = made
        print(f"{run}: {len(found)} incidents, {made['trial_updates']} updates in trials", flush=True)
    rows = [_row(family, [one for one in costs if one.family == family]) for family in given.families]
    rows.append(_row("all", costs))
    print()
    print(table(["steps' time, median [95 %]", "incidents", "ms a step", *PHASES], rows))
    tried = [one for one in costs if one.tried]
    total, trials = (sum(one[name] for one in updates.values()) for name in ("updates", "trial_updates"))
    if tried:
        print(f"treatment of those with a trial: {_cell(tried, 'decide', 'remedy')} steps' time")
    print(f"{len(tried)} incidents had a trial; {trials:,} updates were made in trials, beside {total:,} that landed")
    if given.json:
        raw = [vars(one) for one in costs]
        given.json.write_text(json.dumps({"machine": origin, "costs": raw, "updates": updates}, indent=2) + "\n")


def _row(name: str, costs: list[Cost]) -> list[str]:
    """Make one row of the table."""
    if not costs:
        return [name, "0", "", *("" for _ in PHASES)]
    cells = [_cell(costs, phase) for phase in PHASES]
    return [name, str(len(costs)), f"{1e3 * statistics.median(one.step_s for one in costs):.2f}", *cells]


def _cell(costs: list[Cost], *phases: str) -> str:
    taken = sorted(sum(map(one.steps, phases)) for one in costs)
    return f"{statistics.median(taken):.1f} [{taken[min(len(taken) - 1, int(0.95 * len(taken)))]:.1f}]"


if __name__ == "__main__":
    main()
