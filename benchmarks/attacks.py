"""Hostile and unlucky inputs: damaged files, forged checkpoints, odd configurations, words with secrets in them.

None of them may lose data (a run that resumes ends with the weights of the run that nobody disturbed, or one line says
why not, with the right exit code), have anything executed, let a secret out, hang, die of a signal or show a traceback.
Every run and command has a process of its own. Ends with 1 if an input fails, and names it.

    python benchmarks/attacks.py
    python benchmarks/attacks.py --only "checkpoints: " journal.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from attacks_inputs import INPUTS, Attack
from attacks_place import BEFORE, GOAL, HERE, TRAIN_S, Failed, Place
from fork_server import ENVIRONMENT
from interleaved import table


def prepare(path: Path) -> None:
    """Train what is copied for the inputs, and what it is compared with."""
    place = Place(path / "making", path)
    runs = {"run": [f"run.steps={BEFORE}"], "goal": [f"run.steps={GOAL}"]}
    runs["other"] = [f"run.steps={BEFORE}", "run.seed=1"]
    for name, words in runs.items():
        said = place.train(*words, f"run.dir={name}", limit_s=10 * TRAIN_S)
        if said.code != 0:
            sys.exit(f"the run to be attacked did not end well: {said.last}")
        (place.path / name).rename(path / name)
    shutil.rmtree(place.path)


def why_failed(attack: Attack, place: Place) -> str:
    """Try an input; return what it did that it must not do, or an empty string."""
    why = []
    try:
        for step in (attack, Place.audit):  # what got in or out is looked for in any case
            try:
                step(place)
            except Failed as error:
                why.append(str(error))
            except Exception as error:  # of the harness: the input does not hold either
                where = traceback.extract_tb(error.__traceback__)[-1]
                why.append(f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})")
    finally:
        place.leave()
    return re.sub(r"[^\x20-\x7e]+", " ", "; and ".join(why))[:400]


def main() -> None:
    """Try the inputs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="inputs in whose 'group: name' one is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep what became of each input here")
    parser.add_argument("--list", action="store_true", help="print the inputs, and try none")
    given = parser.parse_args()
    chosen = {
        f"{group}: {name}": attack
        for group, attacks in INPUTS.items()
        for name, attack in attacks.items()
        if any(only in f"{group}: {name}" for only in given.only)
    }
    if given.list:
        print(*chosen, sep="\n")
        return
    if not chosen:
        parser.error(f"--only {' '.join(given.only)}: there is no such input")
    os.environ["OMP_NUM_THREADS"] = "1"  # before the server starts that all processes are forked from
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), ENVIRONMENT["PYTHONPATH"]])
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="attacks-", ignore_cleanup_errors=True) as folder:
        prepare(Path(folder))
        for number, (name, attack) in enumerate(chosen.items(), start=1):
            failures[name] = why_failed(attack, Place(Path(folder, str(number)), Path(folder)))
            told = f"FAILED: {failures[name]}" if failures[name] else "held"
            print(f"{number} of {len(chosen)}: {name}: {told}", file=sys.stderr, flush=True)
    rows = []
    for group in INPUTS:
        own = [why for name, why in failures.items() if name.startswith(f"{group}: ")]
        failed = sum(map(bool, own))
        if own:
            rows.append([group, str(len(own)), str(len(own) - failed), str(failed)])
    print(table(["group", "tried", "held", "failed"], rows))
    print(*(f"FAILED: {name}: {why}" for name, why in failures.items() if why), sep="\n")
    failed = sum(map(bool, failures.values()))
    print(f"{len(failures)} inputs, {failed} failed")
    if given.json:
        given.json.write_text(json.dumps(failures, indent=1))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
