"""Damage the newest checkpoint of a real run in hundreds of ways: each has to be noticed, told, and passed over.

Every damage is looked at as a start does it; every so many are also gone on with by the command, in a process of its
own. The suite does 60 of the same. Ends with 1 if anything went unnoticed.

    python benchmarks/damage.py
    python benchmarks/damage.py --damages 500 --resumes 20
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "checkpoint"))

import test_damage as short
from command import SAVING
from interleaved import table

from resilient_train.durable.store import Store


def train(directory: Path, steps: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "resilient_train", *SAVING, f"run.steps={steps}", f"run.dir={directory}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def resumed(trained: Path, where: Path, seed: int) -> str:
    """Damage a copy and go on with it; returns what went wrong."""
    run_dir = shutil.copytree(trained, where)
    newest = Store(run_dir).entries()[0].path.name
    what = short.damage(run_dir, seed)
    ended = train(run_dir, 40)
    incidents = [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]
    shutil.rmtree(run_dir)
    told = [one["evidence"] for one in incidents if one["signal"] == "checkpoint_damaged"]
    if ended.returncode or len(told) != 1 or newest not in told[0] or "Traceback" in ended.stdout + ended.stderr:
        return f"seed {seed}, {what}: ended with {ended.returncode}, told {told}"
    return ""


def main() -> None:
    """Damage, look, print."""
    parser = argparse.ArgumentParser(description="Damage checkpoints, and see whether it is noticed.")
    parser.add_argument("--damages", type=int, metavar="N", default=500, help="(default: %(default)s)")
    parser.add_argument("--resumes", type=int, metavar="N", default=20, help="by the command (default: %(default)s)")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        trained, copy = Path(folder) / "run", Path(folder) / "copy"
        if train(trained, 30).returncode:
            sys.exit("the run to be damaged did not end well")
        for seed in range(given.damages):
            counts[short.DAMAGES[seed % len(short.DAMAGES)].__name__] += 1
            wrong.append(short.noticed(trained, copy, seed))
        wrong += [resumed(trained, copy, seed) for seed in range(given.damages, given.damages + given.resumes)]
    print(table(["damage", "times"], [[name, str(count)] for name, count in counts.items()]))
    wrong = [line for line in wrong if line]
    print(*wrong, f"{given.damages} damages, {given.resumes} gone on with: {len(wrong)} went wrong", sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
