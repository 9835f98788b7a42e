"""Hostile and unlucky inputs, some hundred: damaged files, forged checkpoints, odd configurations, places and signals.

None of them may lose data (a run that resumes ends with the weights of the run that nobody disturbed, or one line says
why not, with the right exit code), have anything executed, let a secret out, hang, die of a signal or show a traceback.
Every group is tried in a process of its own, and every run and command in one that is forked from there. Ends with 1
if an input fails, and names it.

    python benchmarks/attacks.py                            a quarter of an hour on a machine of its own
    python benchmarks/attacks.py --group checkpoints data
    python benchmarks/attacks.py --only journal.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import warm
from attacks_inputs import inputs
from attacks_place import BEFORE, GOAL, HERE, LONG, TRAIN_S, Failed, Place, Skipped, text_of
from interleaved import table
from warm import ENVIRONMENT, Forked


@dataclass(frozen=True)
class Tried:
    """An input, and what became of it."""

    group: str
    name: str
    seconds: float
    failed: str | None = None  # why
    skipped: str | None = None

    @property
    def held(self) -> bool:
        return self.failed is None and self.skipped is None


def prepare(path: Path, groups: Sequence[str]) -> None:
    """Train what is copied for the inputs of these groups, and what it is compared with."""
    place = Place(path / "making", path)
    weights = {}
    runs: dict[str, list[str]] = {}
    if not {*groups} <= {"configuration", "guard"}:
        runs |= {"run": [f"run.steps={BEFORE}"], "goal": [f"run.steps={GOAL}"]}
    if {"files", "checkpoints"} & {*groups}:
        runs["other"] = [f"run.steps={BEFORE}", "run.seed=1"]
    if "signals" in groups:
        runs["long"] = [f"run.steps={LONG}"]
    if "delivery" in groups:
        nowhere = ["tracking=mlflow", "tracking.uri=http://127.0.0.1:9", "tracking.drain_s=0"]
        runs["mlflow"] = [f"run.steps={BEFORE}", *nowhere]
    for name, words in runs.items():
        said = place.train(*words, f"run.dir={name}", limit_s=10 * TRAIN_S)
        if said.code != 0:
            raise Failed(f"the run to be attacked did not end well: {said.last}")
        summary = json.loads((place.path / name / "summary.json").read_text())
        if name in ("run", "goal", "long"):
            weights[summary["steps"]] = summary["weights_sha256"]
        (place.path / name).rename(path / name)
    (path / "weights.json").write_text(json.dumps(weights))
    shutil.rmtree(place.path)


def try_group(group: str, wanted: Sequence[str], prepared: Path, heard: Path) -> None:
    """Try the inputs of a group one after the other, and note each in a file as soon as it is through."""
    if group == "delivery":
        import resilient_train.tracking.uploader  # noqa: F401  # with MLflow, which takes seconds

    vars(warm)["_context"] = get_context("fork")  # this process has imported what all of them need
    for number, name in enumerate(wanted):
        began, skipped = time.monotonic(), None
        why: list[str] = []
        place = Place(prepared / f"{group}-{number}", prepared)
        try:
            for step in (inputs()[group][name], Place.audit):  # what got in or out is looked for in any case
                try:
                    step(place)
                except Failed as error:
                    why.append(str(error))
                except Skipped as error:
                    skipped = str(error)
                except Exception as error:  # of the harness: it is not held either
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    why.append(f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})")
        finally:
            place.leave()
        failed = _in_one_line("; and ".join(why)) if why else None
        tried = Tried(group, name, round(time.monotonic() - began, 2), failed, skipped)
        with open(heard, "a") as file:
            file.write(json.dumps(vars(tried)) + "\n")


def _in_one_line(text: str) -> str:
    return re.sub(r"[^\x20-\x7e]+", " ", text)[:400]


def tried_in(group: str, wanted: Sequence[str], prepared: Path, limit_s: float) -> list[Tried]:
    """Try a group in a process of its own, and say meanwhile how far it is."""
    heard = prepared / f"{group}.jsonl"
    heard.touch()
    began = time.monotonic()
    process = Forked(try_group, group, wanted, prepared, heard)
    found: list[Tried] = []
    while True:
        code = process.ended(0.2)
        found = [Tried(**json.loads(line)) for line in text_of(heard).splitlines()]
        failed = sum(one.failed is not None for one in found)
        doing = wanted[len(found)] if len(found) < len(wanted) else "done"
        _progress(f"{group}: {len(found)} of {len(wanted)}, {failed} failed: {doing}")
        if code is not None:
            break
        if time.monotonic() - began > limit_s:
            process.kill()
            break
    why = f"the group was ended after {limit_s:.0f} s" if code is None else f"the group ended with {code}"
    return found + [Tried(group, name, 0.0, why) for name in wanted[len(found) :]]


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line[:110]}", end="", file=sys.stderr, flush=True)


def main() -> None:
    """Try them, and print a table."""
    known = inputs()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", nargs="+", choices=known, default=list(known), help="only these groups of inputs")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="only inputs in whose 'group: name' one is"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep what became of each input here")
    parser.add_argument("--list", action="store_true", help="print the inputs, and try none")
    parser.add_argument("--limit", type=float, default=1800, metavar="S", help="for a group (default: %(default).0f)")
    given = parser.parse_args()
    chosen = {
        group: [name for name in known[group] if any(one in f"{group}: {name}" for one in given.only)]
        for group in dict.fromkeys(given.group)
    }
    if given.list:
        print(*(f"{group}: {name}" for group, names in chosen.items() for name in names), sep="\n")
        return
    if not any(chosen.values()):
        parser.error(f"--only {' '.join(given.only)}: there is no such input")
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, in the process that all are forked from
    os.environ["PYTHONPATH"] = warm.ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(HERE), ENVIRONMENT["PYTHONPATH"]])
    tried: list[Tried] = []
    with tempfile.TemporaryDirectory(prefix="attacks-", ignore_cleanup_errors=True) as folder:
        prepared = Path(folder)
        _progress("training what is to be attacked")
        if Forked(prepare, prepared, [group for group, names in chosen.items() if names]).ended(None):
            sys.exit("the runs to be attacked did not end well")
        for group, names in chosen.items():
            if names:
                tried += tried_in(group, names, prepared, given.limit)
        _progress("")
    rows = []
    for group in [*(group for group, names in chosen.items() if names), "all"]:
        own = [one for one in tried if group in (one.group, "all")]
        counts = [len(own), sum(one.held for one in own), sum(one.failed is not None for one in own)]
        rows.append([group, *map(str, counts), f"{sum(one.seconds for one in own):.0f} s"])
    print(table(["group", "tried", "held", "failed", "took"], rows))
    failed = [one for one in tried if one.failed is not None]
    print(*(f"skipped: {one.group}: {one.name}: {one.skipped}" for one in tried if one.skipped), sep="\n", end="")
    print(*(f"FAILED: {one.group}: {one.name}: {one.failed}" for one in failed), sep="\n")
    print(f"{len(tried)} inputs, {len(failed)} failed")
    if given.json:
        given.json.write_text(json.dumps([vars(one) for one in tried], indent=1))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
