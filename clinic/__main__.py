"""The clinic: programs with organic faults. Which tools cure them, and which say what it was?

    python -m clinic run --set twelfth                # our guard, skipping what is not finite, and doing nothing
    python -m clinic run --tool ours mine.tools:guarded --only phase_by_atan2 --seeds 1 --told
    python -m clinic run --tool ours plain skip arc --venv /tmp/arc --json /tmp/first.jsonl
    python -m clinic sound --set first                # is every case what it says?

Other programs, each kind with a harness and options of its own (`--help`):

    python -m clinic changing    # healthy programs that change on purpose, and twins that are damaged instead
    python -m clinic noisy       # healthy programs that are noisy by nature
    python -m clinic climbing    # programs that are ruined slowly
    python -m clinic restarts    # healthy programs whose schedule restarts
    python -m clinic matrix      # random faults in programs of many kinds
    python -m clinic hot         # a schedule that multiplies the learning rate for a while
    python -m clinic rates       # programs drawn at random whose rate is far too high
    python -m clinic state       # damaged weights and moments, for scans to find

Cured: it ended in the ordinary way, its weights are finite, and their loss is within 10 % of the way from the start to
where the mended twin ends. A culprit is right if an incident names file, line and operation; rows are, if all incidents
that blame the data name those which are rotten and no others. What else there is to know is in clinic/README.md.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, in every child

from clinic import sound, with_arc
from clinic.children import Children, keeper, kept, missing
from clinic.program import SETS, names
from clinic.runs import KNOWN, made_by, tool
from clinic.score import TWIN, Figures, Run, by_case, summary

OTHERS = {  # kinds of programs with a harness of their own
    "changing": "clinic.changes",
    "noisy": "clinic.noisy",
    "climbing": "clinic.climbing",
    "trainers": "clinic.trainers",
    "reach": "clinic.reach",
    "restarts": "clinic.restarts",
    "matrix": "clinic.matrix",
    "hot": "clinic.hot_stretch",
    "rates": "clinic.hot_rates",
    "state": "clinic.state_faults",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "clinic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run, check = (
        verbs.add_parser("run", help="train with tools, and judge them"),
        verbs.add_parser("sound", help="check the cases"),
    )
    for one in (run, check):
        one.add_argument("--set", choices=SETS, default="first", help="(default: %(default)s)")
        one.add_argument("--seeds", type=int, metavar="N", default=3, help="of each case (default: %(default)s)")
        one.add_argument("--only", nargs="+", metavar="NAME", help="cases (default: all of the set)")
    tools = f"of {'; '.join(KNOWN)}; or package.module:function (default: ours plain skip)"
    run.add_argument("--tool", nargs="+", metavar="TOOL", default=["ours", "plain", "skip"], help=tools)
    run.add_argument("--from", dest="first", type=int, metavar="SEED", default=0, help="the first seed (default: 0)")
    run.add_argument("--jobs", type=int, metavar="N", default=2, help="runs at a time (default: %(default)s)")
    run.add_argument("--limit", type=int, metavar="S", default=120, help="seconds for a run (default: %(default)s)")
    where = "cuda: where ours trains; what keeps tensors of its own on the CPU fails there (default: %(default)s)"
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=where)
    run.add_argument("--venv", type=Path, metavar="DIR", help="environment for ARC; made if it is not there")
    told = "keep every run there, a line each; what it holds of the same source is not run again"
    run.add_argument("--json", type=Path, metavar="FILE", help=told)
    run.add_argument("--told", action="store_true", help="show what each run prints")
    return parser.parse_args()


def main() -> None:
    """Do what is asked for."""
    if sys.argv[1:2] and sys.argv[1] in OTHERS:
        importlib.import_module(OTHERS[sys.argv.pop(1)]).main()
        return
    clinic()


def clinic() -> None:
    """Check the cases, or run what is missing and print both tables."""
    given, began = arguments(), time.monotonic()
    if given.verb == "sound":
        sound.tell(given.set, given.seeds, chosen(given.set, given.only))
        return
    os.environ["CLINIC_DEVICE"] = given.device  # for the children
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a timeout leaves no process behind
    if given.venv is not None:
        with_arc.begin_again_in(given.venv)
    tools = [name for name in dict.fromkeys(given.tool) if name != "arc" or with_arc.is_here()]
    if "arc" in given.tool and "arc" not in tools:
        print("arc: not run: --venv DIR installs it into an environment of its own")
    for name in tools:
        try:
            tool(name)
        except (ImportError, AttributeError, ValueError) as error:
            sys.exit(f"no such tool: {name} ({error}); known are {'; '.join(KNOWN)}")
    cases = chosen(given.set, given.only)
    print(f"{here(tools)}, seeds {given.first} to {given.first + given.seeds - 1}\n", flush=True)
    wanted = [
        Run(given.set, case, seed, name, made_by(given.set, case, name))
        for case in cases
        for seed in range(given.first, given.first + given.seeds)
        for name in [TWIN, *tools]
    ]
    todo, runs = missing(wanted, kept(given.json))
    keep = keeper(given.json)
    for run in Children(given.jobs, given.limit).carry_out(todo):
        keep(run)
        runs.append(run)
        show(run, told=given.told)
    place = {(run.case, run.seed, run.arm): number for number, run in enumerate(wanted)}
    figures = Figures.of(sorted(runs, key=lambda run: place[run.case, run.seed, run.arm]))
    print(f"{summary(figures)}\n\n{by_case(figures)}\n")
    for run in runs:
        if run.arm == TWIN and (run.case, run.seed) not in figures.yardsticks:
            print(f"NO YARDSTICK, not judged: {run.case}, seed {run.seed}: {run.why or 'its twin is not finite'}")
    print(f"{len(todo)} runs in {time.monotonic() - began:.0f} s, {len(runs) - len(todo)} taken from earlier calls")


def chosen(of: str, only: Sequence[str] | None) -> list[str]:
    """Names of cases; says which are not there."""
    there = names(of)
    if unknown := sorted(set(only or ()) - set(there)):
        sys.exit(f"not in the {of} set: {', '.join(unknown)}; it has {', '.join(there)}")
    return [name for name in there if not only or name in only]


def here(tools: Sequence[str]) -> str:
    """The day, the machine and the versions."""
    packages = ["torch", "accelerate", *([with_arc.PACKAGE] if "arc" in tools else [])]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cpus, load {os.getloadavg()[0]:.1f}"
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    revision = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    python = platform.python_version()
    return f"{time.strftime('%Y-%m-%d')}, {machine}, Python {python}, {versions}, revision {revision}"


def show(run: Run, *, told: bool) -> None:
    """One line when a run has ended, and what it printed if that is wanted."""
    loss = "not finite" if run.loss is None else f"{run.loss:.4g}"
    lost = "" if run.lost is None else f", {run.lost} lost"
    print(f"{run.case} {run.seed} {run.arm}: {loss}{lost} [{run.seconds} s] {run.why}", file=sys.stderr, flush=True)
    if told and run.told:
        print("\n".join(f"    {line}" for line in run.told.splitlines()), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
