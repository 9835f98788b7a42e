"""What a step of ours costs beside a step of the plain loop, as a ratio from one interleaved run.

Ours runs as a user's does: default checks, snapshots in memory, a policy. It stands beside the same loop written by
hand, once with the same optimizer (`plain`: fused AdamW) and once with AdamW as torch chooses it (`default`), both
with the same clipping. A block is a whole number of the intervals at which we take snapshots and scan, so that no
median leaves those out. Then come counts for each step, which do not vary from run to run.

    python benchmarks/step_cost.py
    python benchmarks/step_cost.py --workload mlp --tracking mlflow --json figures.json
    python benchmarks/step_cost.py --workload tiny --loops plain ours unchecked         (the command's own model)
    python benchmarks/step_cost.py --loops plain plain-again      (what the method sees where nothing differs)
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from interleaved import Job, Loop, Timing, begin, compared, table, time_blocks
from loops import LOOPS, OVERRIDES, plain, unchecked

# Of a snapshot's interval at least. And MLflow's thread sends every 1.5 s: a shorter block would leave that out.
STEPS_PER_BLOCK = {"none": {"gpt": 25, "mlp": 200, "tiny": 50}, "mlflow": {"gpt": 25, "mlp": 2000, "tiny": 200}}
# Until every slot for a snapshot was used once: memory is touched for the first time then.
WARM_UP = {"gpt": 125, "mlp": 600, "tiny": 200}
TARGETS = {"gpt": 1.05, "mlp": 1.20, "tiny": 1.10}  # upper bound of ours beside plain
ALL: dict[str, Loop] = {**LOOPS, "plain-again": plain, "unchecked": unchecked}


def measure(given: argparse.Namespace, workload: str) -> dict[str, Any]:
    """Time, count and print one workload."""
    steps_per_block = given.steps_per_block or STEPS_PER_BLOCK[given.tracking][workload]
    warm_up = WARM_UP[workload] if given.warm_up is None else given.warm_up
    loops = {name: ALL[name] for name in given.loops}
    job = Job(workload, warm_up, warm_up, given.log_every, given.tracking)
    timing = time_blocks(loops, job, blocks=given.blocks, steps_per_block=steps_per_block, rounds=given.rounds)
    print(f"\n{workload}: {timing.work['weights'] / 1e6:.2f} M weights, {timing.blocks} blocks of", end=" ")
    print(f"{timing.steps_per_block} steps, tracking {given.tracking}, load now {os.getloadavg()[0]:.1f}")
    title, rows = compared(timing, [name for name in ("plain", "default") if name in loops] or [given.loops[0]])
    print(table(title, rows))
    verdict = judge(timing, workload)
    if verdict:
        print(f"  {verdict}")
    ratios = {other: timing.ratio("ours", other) for other in loops if "ours" in loops and other != "ours"}
    return {**timing.as_dict(), "ours_beside": ratios}


def judge(timing: Timing, workload: str) -> str:
    """Say whether the target is met."""
    if not {"plain", "ours"} <= set(timing.ms["wall"]):
        return ""
    _, _, high = timing.ratio("ours", "plain")
    met = "met" if high <= TARGETS[workload] else "missed"
    return f"target: ours beside plain at most {TARGETS[workload]:.2f}, upper bound: {met} with {high:.3f}"


def main() -> None:
    """Measure, print, and write the figures if asked to."""
    parser = argparse.ArgumentParser(
        description="Compare the cost of a step: ours beside hand-written Accelerate loops.",
        epilog="Both workloads take about 8 minutes; with --tracking mlflow, whose blocks are longer, about 12.",
    )
    parser.add_argument("--workload", action="append", choices=sorted(OVERRIDES), help="default: gpt and mlp")
    parser.add_argument("--blocks", type=int, metavar="N", default=30, help="of each loop (default: %(default)s)")
    parser.add_argument("--steps-per-block", type=int, metavar="N", help="default: 0.2 to 2 s; 2 s with mlflow")
    parser.add_argument("--warm-up", type=int, metavar="N", help="steps before the first block (default: 125 or 600)")
    fresh = "fresh sets of processes (default: %(default)s)"
    parser.add_argument("--rounds", type=int, metavar="N", default=3, help=fresh)
    lines = "steps between two lines (default: %(default)s)"
    parser.add_argument("--log-every", type=int, metavar="N", default=10, help=lines)
    parser.add_argument(
        "--loops", nargs="+", choices=list(ALL), default=list(LOOPS), help=f"default: {' '.join(LOOPS)}"
    )
    tracks = "where ours shows the run; mlflow: a new SQLite database (default: %(default)s)"
    parser.add_argument("--tracking", choices=sorted(STEPS_PER_BLOCK), default="none", help=tracks)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args()
    figures: dict[str, Any] = {"machine": begin(), "tracking": given.tracking, "log_every": given.log_every}
    for workload in given.workload or ("gpt", "mlp"):
        figures[workload] = measure(given, workload)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
