"""What runs decide and where they end, bit for bit: a net under changes that are to change neither.

Each run has a process of its own: drills under policies, rates that are too high, loops of users, trainers, the clinic,
two ranks, kills and resumes. Its facts are taken down: exit codes, digests of the weights, and of each incident the
signal, the cause, the line, the rows, what was done and what came of it; no sentences, and nothing that a clock says.
Bits differ between processors, so versions are compared on one machine:

    python benchmarks/references.py --against main             # all runs, here and with the library of that commit
    python benchmarks/references.py --out facts.json           # keeps the facts of this tree
    python benchmarks/references.py --against facts.json       # compares with facts that were kept
    python benchmarks/references.py --twice --only 'drill *'   # is a run the same when it is made again?

The programs are those of this tree, only the library is the other's. It ends with 1 if any fact differs: that is a
decision that has changed, and a commit has to say why.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fnmatch
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from clinic.paired import lines_of

ROOT = Path(__file__).resolve().parents[1]
PLACES = [ROOT / name for name in ("benchmarks", "", "tests", "examples")]  # of programs
LIMIT_S = 300  # for one run: more is a fact
NOT_COMPARED = ("seconds", "output")
KEPT = ("signal", "cause", "step", "ranks", "rows", "actions", "rewound_to", "outcome", "further", "gave_up")
OF_SUMMARY = ("status", "steps", "ticks", "trial_updates", "verdict", "final_loss", "weights_sha256")
Facts = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run: what each of its starts is given, one after the other in the same directory, on so many ranks."""

    name: str
    starts: Sequence[Sequence[str]]
    ranks: int = 1


# ------------------------------------------------------------------------------------------------------------ the runs

MLP = ["model=mlp", "data=digits", "optimizer.lr=3e-3", "run.steps=300", "checkpoint.disk.every=100"]
DIGITS = [*MLP, "objective=classification"]
SGD = [*DIGITS, "model.hidden=[64]", "optimizer=sgd", "optimizer.lr=0.1"]
RESNET = [*DIGITS, "model=resnet", "model.depth=8", "model.width=4", "run.steps=160"]
GPT = ["model=gpt", "model.layers=1", "model.width=48", "model.heads=2", "model.context=32", "optimizer.lr=3e-3"]
GPT += ["data=python_source", "data.train.context=32", "data.train.max_bytes=100000", "data.batch_size=8"]
GPT += ["objective=language_model", "run.steps=200"]
SIGNALLED = [*MLP, "objective=custom", "objective._target_=referenced.programs.signalled_command"]
SIGNALLED += ["checkpoint.disk.every=50", "drill=nan_grad", "drill.at=[60,250]"]

DRILLS = {  # and the policies that meet them
    **dict.fromkeys(("none", "nan_batch", "nan_grad", "inf_loss", "loss_spike", "bad_moments"), ("balanced",)),
    "bit_flip": ("balanced", "palm"),
    "bad_row": ("balanced", "conservative"),
    "hot_lr": ("balanced", "conservative", "palm"),
    "gauntlet": ("balanced", "conservative", "aggressive", "palm", "skip", "off", "observe"),
}
EXAMPLES = ("gan.in_turn", "gan.together", "accelerate_loop.guarded", "accelerate_loop.handed_over")
PROGRAMS = {  # of referenced/programs.py, and their arguments
    "drawn": ("",),
    "loader": ("",),
    "flipped": ("balanced", "off"),
    "hot_stretch": ("30 10 100 objective adamw", "100 10 40 handed_over adamw", "1000 5 20 objective sgd"),
    "hugging_face": ("llama nan_batch", "gpt2 bit_flip", "gpt2 operation", "vit bad_rows"),
    "lightning": ("rows", "operation", "rate", "bit_flip"),
}
CLINIC = {  # by cause
    "data": ("first.nan_inputs", "first.outlier_labels", "first.label_out_of_range", "first.broken_files"),
    "operation": (
        "first.where_branch",
        "first.attention_all_masked",
        "first.zero_embeddings_bf16",
        "second.total_variation_of_void_tiles",
        "second.gaussian_process_repeated_runs",
    ),
    "overflow": ("first.half_scores", "first.repeated_squaring"),
    "explosion": ("first.momentum_too_fast", "first.linear_regression_unscaled", "first.adam_lr_one"),
    "optimizer": ("first.adam_in_half", "third.lars_by_hand"),
}


def runs() -> Iterator[Run]:
    """All runs."""
    for drill, policies in DRILLS.items():
        for policy in policies:
            yield Run(f"drill {drill} {policy}", [command(*DIGITS, f"drill={drill}", f"recovery={policy}")])
    yield Run("drill outliers", [command(*DIGITS, "drill=bad_row", "drill.what=outlier")])
    yield Run("drill gauntlet, paranoid", [command(*DIGITS, "drill=gauntlet", "checks=paranoid")])
    yield Run("drill gauntlet, sgd", [command(*SGD, "drill=gauntlet")])
    yield Run("drill gauntlet, resnet", [command(*RESNET, "drill=gauntlet")])
    more = ("accelerate.gradient_accumulation_steps=2", "accelerate.mixed_precision=bf16")
    yield Run("drill gauntlet, gpt", [command(*GPT, *more, "drill=gauntlet")])
    yield Run("drill hot_lr, gpt", [command(*GPT, "drill=hot_lr")])
    yield from (Run(f"example {name}", [[name]]) for name in EXAMPLES)
    for name, given in PROGRAMS.items():
        yield from (Run(f"{name} {words}".strip(), [[name, *words.split()]]) for words in given)
    for cases in CLINIC.values():
        yield from (Run(f"clinic {case}", [["clinic", case]]) for case in cases)
    yield Run("two ranks gauntlet", [command(*DIGITS, "drill=gauntlet")], ranks=2)
    yield Run("two ranks bit_flip", [command(*DIGITS, "drill=bit_flip", "drill.rank=1")], ranks=2)
    yield Run("two ranks nan_inputs", [["clinic", "first.nan_inputs"]], ranks=2)
    for name, number in (("kill", signal.SIGKILL), ("stop", signal.SIGTERM)):
        signalled = command(*SIGNALLED, f"+objective.number={int(number)}")
        yield Run(f"{name} and resume, command", [signalled] * 2)
        yield Run(f"{name} and resume, two ranks", [signalled] * 2, ranks=2)
        yield Run(f"{name} and resume, loop", [["signalled", str(int(number))]] * 2)


def command(*overrides: str) -> list[str]:
    """A start of the command."""
    return ["resilient_train", *overrides, "run.dir=run", "tracking=none", "accelerate.cpu=true", "run.log_every=100"]


# ------------------------------------------------------------------------------------------- in the process of a start


def begin(words: Sequence[str], tree: Path, folder: Path, environment: dict[str, str], output: str) -> None:
    """Be a new interpreter that is given `words`, and end as one does; on rank 0 leave a digest of the weights."""
    os.setsid()  # what it starts itself ends with it
    os.environ.update(environment)
    os.chdir(folder)
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.path[:0] = [str(tree), *map(str, PLACES)]
    code: object = 0
    try:
        carry_out(words)
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        sys.last_value = error  # as an interpreter does
        traceback.print_exc()
        code = type(error).__name__
    if environment.get("RANK", "0") == "0":
        of_program = programs.digest() if (programs := sys.modules.get("referenced.programs")) else None
        library = getattr(sys.modules.get("resilient_train"), "__file__", None)
        Path("end.json").write_text(json.dumps({"code": code, "weights": of_program, "library": library}))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if code in (0, None) else code if isinstance(code, int) else 1)


def carry_out(words: Sequence[str]) -> None:
    """Run the command, an example, or one of our programs."""
    import torch

    torch.set_num_threads(1)
    name, *arguments = words
    if name == "resilient_train":
        sys.argv = [name, *arguments]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    programs = importlib.import_module("referenced.programs")
    module, _, function = name.rpartition(".")
    if module:
        programs.trained.append(getattr(importlib.import_module(module), function)(programs.RUN))
    else:
        getattr(programs, name)(*arguments)


# --------------------------------------------------------------------------------------------- in the process that asks

_context = multiprocessing.get_context("forkserver")
_polling = threading.Lock()  # a start polls every process, and an exit code can be read only once
IMPORTED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "accelerate"]  # takes seconds; nothing of the library


def make(run: Run, tree: Path) -> Facts:
    """Make a run, and return its facts."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="reference-") as temporary:
        folder, ends = Path(temporary), []
        for number, words in enumerate(run.starts):
            output = str(folder / f"output-{number}")
            places = group(run.ranks)
            started = [_context.Process(target=begin, args=(words, tree, folder, place, output)) for place in places]
            with _polling:
                for process in started:
                    process.start()
            for process in started:
                wait([process.sentinel], max(0.0, began + LIMIT_S - time.monotonic()))
            with _polling:
                ends.append(["timed out" if process.is_alive() else process.exitcode for process in started])
                for process in started:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid or 0, signal.SIGKILL)
                    process.kill()  # before it has a group of its own
                    process.join()
        facts = facts_of(folder, tree) | {"exit codes": ends}
        facts["seconds"] = round(time.monotonic() - began, 1)
        if ends[-1] != [0] * run.ranks:
            facts["output"] = lines_of(Path(output))[-20:]
    return facts


def group(ranks: int) -> list[dict[str, str]]:
    """What the environment of each rank says, so that they find each other; nothing, where there is only one."""
    if ranks == 1:
        return [{}]
    import interleaved  # and torch

    return interleaved.group(ranks)


def facts_of(folder: Path, tree: Path) -> Facts:
    """Read what a run has left in its directory, without what was measured by a clock, or said."""
    facts: Facts = {"directories": sorted(place.name for place in folder.glob("run*"))}
    if (folder / "end.json").exists():
        end = json.loads((folder / "end.json").read_text())
        facts |= {"ended with": end["code"], "weights of the program": end["weights"]}
        assert Path(end["library"] or tree).is_relative_to(tree), f"{end['library']} is not the library of {tree}"
    run_dir = folder / "run"
    if (run_dir / "summary.json").exists():
        summary = json.loads((run_dir / "summary.json").read_text())
        facts |= {name: summary.get(name) for name in OF_SUMMARY}
    incidents = [json.loads(line) for line in lines_of(run_dir / "incidents.jsonl")]
    for incident in sorted(incidents, key=lambda one: int(one["id"])):
        kept: Facts = {name: incident.get(name) for name in KEPT}
        for name in ("culprit", "symptom"):
            kept[name] = (found := incident.get(name)) and place_of(found, tree)
        kept["tried"] = [[arm["rate"], arm["anomalies"], arm["won"]] for arm in incident.get("tried") or []]
        facts[f"incident {incident['id']}"] = kept
    return facts


def place_of(culprit: Facts, tree: Path) -> str:
    """Write phase, operation and line: of the library its text, as its numbers change with every line above it."""
    file, line = Path(culprit["file"]), culprit["line"]
    if file.is_relative_to(tree / "resilient_train"):
        where = f"{file.name}: {file.read_text().splitlines()[line - 1].strip()}"
    else:
        where = f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}:{line}"
    return f"{culprit['phase']} {culprit['op']} {where}"


def flat(facts: Facts, other: Facts) -> dict[str, str]:
    """Each fact by its name: those of an incident one by one, if the other side has it, too.

    Why a run gave up is said differently by different versions: it counts that it did.
    """
    found: dict[str, str] = {}
    for name, value in facts.items():
        if isinstance(value, dict) and isinstance(other.get(name), dict):
            compared = {key: one is not None if key == "gave_up" else one for key, one in value.items()}
            found |= {f"{name}, {key}": json.dumps(one) for key, one in compared.items()}
        elif name not in NOT_COMPARED:
            found[name] = json.dumps(value)
    return found


def differences(first: Facts, second: Facts) -> list[str]:
    """What differs, a line each; a NaN is like another."""
    one, two = flat(first, second), flat(second, first)
    return [
        f"{name}: {one.get(name, 'nothing'):.300} -> {two.get(name, 'nothing'):.300}"
        for name in dict.fromkeys([*one, *two])
        if one.get(name) != two.get(name)
    ]


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A tree of a commit, for as long as it is needed."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="references-") as place:
        tree = Path(place).resolve() / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def make_all(wanted: Sequence[Run], sides: dict[str, Path], jobs: int) -> dict[str, dict[str, Facts]]:
    """Make each run on each side, the sides of a run next to each other, and return the facts by side and name."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}
    _context.set_forkserver_preload(IMPORTED)
    facts: dict[str, dict[str, Facts]] = {side: {} for side in sides}
    pool = ThreadPoolExecutor(jobs)
    try:
        futures = {pool.submit(make, run, tree): (side, run.name) for run in wanted for side, tree in sides.items()}
        for done, future in enumerate(as_completed(futures), 1):
            side, name = futures[future]
            facts[side][name] = made = future.result()
            incidents = sum(key.startswith("incident ") for key in made)
            said = f"{incidents} incidents, exit codes {made['exit codes']}, {made['seconds']} s"
            print(f"{done}/{len(futures)} {name} ({side}): {said}", file=sys.stderr, flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return {side: {run.name: made[run.name] for run in wanted} for side, made in facts.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs, compare if there is something to compare with, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--against", metavar="COMMIT", help="or a file that --out has written")
    others.add_argument("--twice", action="store_true", help="make each run again, and compare")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="a name, or a pattern such as 'clinic *'")
    parser.add_argument("--list", action="store_true", help="print the names of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="keep the facts of this tree")
    given = parser.parse_args(arguments)
    wanted = [run for run in runs() if any(fnmatch.fnmatch(run.name, only) for only in given.only or ["*"])]
    if not wanted:
        parser.error(f"there is no such run; there are {', '.join(run.name for run in runs())}")
    if given.list:
        print("\n".join(run.name for run in wanted))
        return 0
    first, sides = "", {"this tree": ROOT}
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        kept: dict[str, Facts] = {}
        if given.twice:
            first, sides = "the first time", {"the first time": ROOT, **sides}
        elif given.against and given.against.endswith(".json"):
            first, kept = given.against, json.loads(Path(given.against).read_text())
        elif given.against:
            first, sides = given.against, {given.against: stack.enter_context(worktree(given.against)), **sides}
        facts = make_all(wanted, sides, given.jobs)
    mine = facts["this tree"]
    if given.out:
        given.out.write_text(json.dumps(mine, indent=1) + "\n")
    minutes = (time.monotonic() - began) / 60
    if not first:
        print(f"{len(mine)} runs in {minutes:.1f} minutes; nothing to compare with")
        return 0
    before = kept or facts[first]
    found = {name: differences(before.get(name, {}), made) for name, made in mine.items()}
    for name, lines in found.items():
        for line in lines if name in before else ["nothing is known of it"]:
            print(f"DIFFERS {name}: {line}")
    number = sum(bool(lines) for lines in found.values())
    print(f"{number} of {len(found)} runs differ between {first} and this tree; {minutes:.1f} minutes")
    return 1 if number else 0


if __name__ == "__main__":
    sys.exit(main())
