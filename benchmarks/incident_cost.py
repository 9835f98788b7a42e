"""What an incident costs: how long it takes from the verdict to the end of its remedy, in steps of its run.

The programs and faults are those of `python -m clinic matrix`, with a guard. The seconds of an incident are those of
incidents.jsonl; a step is the median time from one update to the next in the same run. Trials are shown with the
updates that they made.

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
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from interleaved import machine, table

sys.path.insert(0, str(Path(__file__).parents[1]))

from clinic.matrix import drawn
from clinic.matrix_faults import FAMILIES
from clinic.matrix_loops import Job, Kit, ended, started_worker


@dataclass(frozen=True)
class Cost:
    """Of one incident, and a step of its run."""

    family: str
    program: str
    signal: str
    step_s: float
    seconds: float
    tried: int  # arms of a trial

    @property
    def steps(self) -> float:
        return self.seconds / self.step_s


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
        incidents = [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text("utf-8").splitlines()]
        summary = json.loads((run_dir / "summary.json").read_text("utf-8"))
    step_s = statistics.median(late - early for early, late in itertools.pairwise(moments))
    program = f"{job.recipe}, {job.optimizer}"
    costs = [
        Cost(family, program, one["signal"], step_s, one["seconds"], tried=len(one.get("tried") or ()))
        for one in incidents
    ]
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
    print(table(["fault", "incidents", "ms a step", "steps' time, median [95 %]"], rows))
    tried = [one for one in costs if one.tried]
    total, trials = (sum(one[name] for one in updates.values()) for name in ("updates", "trial_updates"))
    if tried:
        print(f"treatment of those with a trial: {_cell(tried)} steps' time")
    print(f"{len(tried)} incidents had a trial; {trials:,} updates were made in trials, beside {total:,} that landed")
    if given.json:
        raw = [vars(one) for one in costs]
        given.json.write_text(json.dumps({"machine": origin, "costs": raw, "updates": updates}, indent=2) + "\n")


def _row(name: str, costs: list[Cost]) -> list[str]:
    """Make one row of the table."""
    if not costs:
        return [name, "0", "", ""]
    return [name, str(len(costs)), f"{1e3 * statistics.median(one.step_s for one in costs):.2f}", _cell(costs)]


def _cell(costs: list[Cost]) -> str:
    taken = sorted(one.steps for one in costs)
    return f"{statistics.median(taken):.1f} [{taken[min(len(taken) - 1, int(0.95 * len(taken)))]:.1f}]"


if __name__ == "__main__":
    main()
