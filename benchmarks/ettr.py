"""The share of time that makes progress (ETTR) for 8 to 100,000 GPUs, by simulation.

Costs are measured or assumed (`Costs` says which), rates of failures are published ones. A run fails in two ways. It
*breaks*: a GPU, a host or a network link stops it, and it restarts from its newest checkpoint; the rate grows with the
number of GPUs. Or it is *spoiled*: a NaN, a spike, a divergence, which no restart repairs; the rate is one of the
recipe. Each part of the package is added to those before it:

    periodic       a checkpoint every 30 minutes, for which training waits; a person notices spoiled weights, and goes
                   back to an older checkpoint
    in background  the same interval, but training waits only for the copy of the state
    + rewind       spoiled weights are noticed, diagnosed and rewound in memory, without a restart
    + hang         a hang is noticed by the limit of a step instead of the timeout of a collective operation
    + interval     the time between checkpoints follows from their cost and the rate of failures (Young's formula)

    python benchmarks/ettr.py
    python benchmarks/ettr.py --restart 120 --notice-hours 1 --json figures.json
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

DAY, MINUTE = 86_400.0, 60.0
GPUS = (8, 64, 512, 4_096, 9_600, 16_384, 50_000, 100_000)

# Llama 3 405B: 419 unexpected interruptions of 16,384 GPUs in 54 days; 3 of them needed a person; over 90 % effective.
BREAKS_PER_GPU_SECOND = 419 / 54 / DAY / 16_384
SPOILED_PER_DAY = {"few spikes (Llama 3: 3 in 54 days)": 3 / 54, "many spikes (PaLM: about 20 in 60 days)": 20 / 60}
REPORTED = {16_384: "over 90 % (Llama 3)", 9_600: "97 % (ByteRobust)"}


@dataclass(frozen=True)
class Costs:
    """What things cost, in seconds unless it says otherwise."""

    step: float = 5.0  # assumed: of a large language model
    restart: float = 300.0  # assumed: of a large job, from its end to its next update
    checkpoint: float = 60.0  # assumed: until it is written; training waits for it in `periodic`
    copy: float = 2.0  # assumed: of the state to the host's memory: 40 GB at 20 GB/s
    notice: float = 4 * 3600.0  # assumed: until a person notices spoiled weights, and goes back
    hangs: float = 0.1  # assumed: share of the breaks that hang instead of ending
    collective_timeout: float = 600.0  # PyTorch's default for NCCL
    steps_of_hang: float = 12.0  # a limit of a step, set to so many of them
    lost_steps: float = 40.0  # measured: back to the newest verified snapshot (an incident of the demo: 38)
    diagnosis_steps: float = 10.0  # bound that benchmarks/recovery.py is held to


@dataclass(frozen=True)
class Parts:
    """Which parts of the package a run has."""

    in_background: bool = False
    rewinds: bool = False
    limits_steps: bool = False
    tunes_interval: bool = False


ARMS = {"periodic": Parts()}
for _name, _part in (
    ("in background", "in_background"),
    ("+ rewind", "rewinds"),
    ("+ hang", "limits_steps"),
    ("+ interval", "tunes_interval"),
):
    ARMS[_name] = replace(list(ARMS.values())[-1], **{_part: True})


def interval_of(parts: Parts, costs: Costs, breaks: float) -> float:
    """Return the seconds of training between two checkpoints. One has to be written before the next begins."""
    if not parts.tunes_interval:
        return 30 * MINUTE
    wait = costs.copy if parts.in_background else costs.checkpoint
    return max(math.sqrt(2 * wait / breaks), costs.checkpoint)


def share_of_progress(parts: Parts, costs: Costs, gpus: int, spoiled_per_day: float, days: float, seed: int) -> float:
    """Simulate one run from failure to failure; return the share of its time that made progress that was kept."""
    numbers = np.random.default_rng(seed)
    breaks, spoiled = BREAKS_PER_GPU_SECOND * gpus, spoiled_per_day / DAY
    every, wait = interval_of(parts, costs, breaks), costs.copy if parts.in_background else costs.checkpoint
    hang = costs.steps_of_hang * costs.step if parts.limits_steps else costs.collective_timeout
    wall = kept = at_risk = 0.0  # `at_risk`: progress since the newest checkpoint that is on disk
    while wall < days * DAY:
        gap = numbers.exponential(1 / (breaks + spoiled))
        wall += gap
        cycles, rest = divmod(gap + at_risk, every + wait)
        progress = cycles * every + min(rest, every)
        is_break = numbers.random() < breaks / (breaks + spoiled)
        if not is_break and parts.rewinds:
            wall += (costs.lost_steps + costs.diagnosis_steps) * costs.step
            kept += cycles * every
            at_risk = min(rest, every)
            continue
        late = costs.checkpoint if parts.in_background else 0.0  # the newest one may still be on its way to the disk
        if cycles and rest < late:
            cycles -= 1
        kept += min(cycles * every, progress)
        at_risk = 0.0
        wall += costs.restart
        if is_break:
            wall += hang * (numbers.random() < costs.hangs)
        else:
            wall += costs.notice  # trained on spoiled weights
    return min(1.0, (kept + at_risk) / wall)


def table(costs: Costs, days: float, runs: int) -> dict[str, dict[str, dict[int, float]]]:
    """Return the median share of `runs` runs: by rate of spikes, arm and number of GPUs."""
    return {
        rate: {
            arm: {
                gpus: float(np.median([share_of_progress(parts, costs, gpus, each, days, s) for s in range(runs)]))
                for gpus in GPUS
            }
            for arm, parts in ARMS.items()
        }
        for rate, each in SPOILED_PER_DAY.items()
    }


def main() -> None:
    """Simulate, print, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description="Simulate the share of time that makes progress, by number of GPUs.")
    for name, value, what in (
        ("days", 54.0, "length of a run"),
        ("step", Costs.step, "seconds of a step"),
        ("restart", Costs.restart, "seconds of a restart"),
        ("checkpoint", Costs.checkpoint, "seconds to write a checkpoint"),
        ("notice-hours", Costs.notice / 3600, "hours until a person notices spoiled weights"),
    ):
        parser.add_argument(f"--{name}", type=float, default=value, help=f"{what} (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=31, help="simulated runs of each kind (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args()
    costs = Costs(step=given.step, restart=given.restart, checkpoint=given.checkpoint, notice=given.notice_hours * 3600)
    print("costs in seconds: " + ", ".join(f"{name} {value:g}" for name, value in asdict(costs).items()))
    figures = table(costs, given.days, given.runs)
    for rate, arms in figures.items():
        print(f"\n{rate}\n{'GPUs':>16}" + "".join(f"{gpus:>9,}" for gpus in GPUS))
        for arm, shares in arms.items():
            print(f"{arm:>16}" + "".join(f"{shares[gpus]:>9.1%}" for gpus in GPUS))
    tuned = {gpus: interval_of(ARMS["+ interval"], costs, BREAKS_PER_GPU_SECOND * gpus) for gpus in GPUS}
    print(f"{'its minutes':>16}" + "".join(f"{seconds / MINUTE:>9.1f}" for seconds in tuned.values()))
    print("\nreported: " + ", ".join(f"{gpus:,} GPUs {share}" for gpus, share in REPORTED.items()))
    if given.json:
        given.json.write_text(
            json.dumps({"costs": asdict(costs), "share": figures, "interval": tuned}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
