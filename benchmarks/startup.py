"""How much later our first update lands than the plain script's, from command to line on the terminal.

Fresh processes, one at a time, in the order plain, ours, ours, plain; ours with MLflow on a database that does not
exist yet. Both print a line after every update into a pipe: the first line of step 1 stops the clock, and the process.

    python benchmarks/startup.py
    python benchmarks/startup.py --pairs 15 --json figures.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from step_cost import machine, median_with_interval

STEPS = 1000
PLAIN = [str(Path(__file__).with_name("plain_loop.py")), "mlp", f"--steps={STEPS}", "--log-every=1"]
OURS = ["-m", "resilient_train", "model=mlp", "data=digits", "objective=classification", f"run.steps={STEPS}"]
OURS += ["run.log_every=1", "run.dir=run", "tracking=mlflow", "tracking.uri=sqlite:///mlflow.db"]


def first_update(command: list[str]) -> float:
    """Run a command in an empty directory until its first update; return how many seconds that took."""
    with TemporaryDirectory(prefix="startup-") as scratch:
        command = [sys.executable, *command]
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=scratch, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(f"step 1/{STEPS}"):
                    return time.perf_counter() - started
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    raise SystemExit(f"{' '.join(command)} ended before its first update")


def main() -> None:
    """Measure, print, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description="Compare the time from command to first update: ours, plain script.")
    parser.add_argument("--pairs", type=int, default=9, help="starts of each (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    origin = machine()
    print(", ".join(f"{name} {value}" for name, value in origin.items()), flush=True)
    commands = {"plain": PLAIN, "ours": OURS}
    for command in commands.values():
        first_update(command)  # from now on the files of both are in memory
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    for pair in range(given.pairs):
        order = ("plain", "ours") if pair % 2 == 0 else ("ours", "plain")
        for name in order:
            seconds[name].append(first_update(commands[name]))
    later = median_with_interval([np.array([b - a]) for a, b in zip(seconds["plain"], seconds["ours"], strict=True)])
    print(f"plain {np.median(seconds['plain']):.2f} s  ours {np.median(seconds['ours']):.2f} s to the first update")
    print(f"ours later by {later[0]:.2f} s [{later[1]:.2f}, {later[2]:.2f}], {given.pairs} pairs")
    if given.json:
        given.json.write_text(json.dumps({"machine": origin, "seconds": seconds, "later": later}, indent=2) + "\n")


if __name__ == "__main__":
    main()
