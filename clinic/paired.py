"""What `noisy`, `climbing` and `changing` share: programs that run with and without a guard, records and tables.

Each run has a process of its own, forked from one that has imported torch, and 180 s of CPU. It becomes one line of
JSON: what was measured, what was raised, what the run directory says, and the last lines of the log. A run that is in
the file given with --out is not made again.
"""

from __future__ import annotations

import argparse
import atexit
import fnmatch
import importlib.util
import json
import logging
import math
import multiprocessing
import os
import re
import resource
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any

CPU_LIMIT, WALL_LIMIT = 180, 1200  # seconds
KEPT = ("id", "signal", "cause", "step", "outcome", "rows", "actions", "culprit")
Record = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """A program; `train(seed, guard)` gives a held-out loss, or that and the one of a run without the cause."""

    name: str
    train: Callable[..., float | tuple[float, float]]


def load(file: Path) -> ModuleType:
    """Import a file by its path."""
    spec = importlib.util.spec_from_file_location(f"program_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # data loaders and dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def finite(value: object) -> float | None:
    """Give a number that JSON can hold."""
    return value if isinstance(value, float) and math.isfinite(value) else None


# In the process of a run.


def child(file: Path, name: str, seed: int, arm: str, folder: Path, tree: str | None) -> None:
    """Make one run, and leave `result.json`, `log` and `output` in its folder."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT + 5))
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if tree:
        sys.path.insert(0, tree)
    import torch

    torch.set_num_threads(1)
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    multiprocessing.set_start_method("fork", force=True)  # a worker of a loader cannot import a program by its name
    if arm == "skip":
        register_optimizer_step_pre_hook(skip)
    logger = logging.getLogger("resilient_train")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.FileHandler(folder / "log"))
    is_guarded = arm.endswith("guarded")
    guard = {"run_dir": str(folder / "run"), "recovery": "balanced"} if is_guarded else None
    result: Record = {"measure": None, "best": None, "error": None}
    began = time.process_time()
    try:
        module = load(file)
        if hasattr(module, "programs"):
            train = next(program.train for program in module.programs() if program.name == name)
            value = train(seed, guard)
        else:
            value = module.train(seed, guard, twin=arm.startswith("twin"))
        measure, best = value if isinstance(value, tuple) else (value, None)
        result |= {"measure": finite(measure), "best": finite(best)}
    except Exception as error:
        traceback.print_exc()
        result["error"] = {"type": type(error).__name__, "message": str(error)[:2000]}
        result["measure"] = finite(
            error.__dict__.get("measure")
        )  # of the state that it left, where the program says it
    result["cpu"] = round(time.process_time() - began, 2)
    if "resilient_train" in sys.modules:
        result["library"] = str(sys.modules["resilient_train"].__file__)
    (folder / "result.json").write_text(json.dumps(result))
    if is_guarded:
        atexit._run_exitfuncs()  # a process of multiprocessing would end without them


def skip(optimizer: Any, args: Any, kwargs: Any) -> None:
    """What people put before a step, in any loop: without gradients an optimizer does nothing."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
    if not all(weight.grad.isfinite().all() for weight in weights):
        optimizer.zero_grad()


# In the process that starts them.


def lines_of(path: Path) -> list[str]:
    """Read the lines of a file that may not be there."""
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def run(context: ForkServerContext, file: Path, name: str, seed: int, arm: str, tree: str | None) -> Record:
    """Make one run in a process of its own, and record it."""
    record: Record = {"program": name, "seed": seed, "arm": arm, "tree": tree}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        process = context.Process(target=child, args=(file, name, seed, arm, folder, tree))
        began = time.monotonic()
        process.start()
        process.join(WALL_LIMIT)
        is_hanging = process.is_alive()
        process.kill()
        process.join()
        record["wall"] = round(time.monotonic() - began, 2)
        result = lines_of(folder / "result.json")
        if result:
            record |= json.loads(result[0])
        else:
            ended = f"hung for {WALL_LIMIT} s" if is_hanging else f"exit code {process.exitcode}"
            record |= {"measure": None, "best": None, "error": {"type": "Killed", "message": ended}}
        if record["error"]:
            record["output"] = lines_of(folder / "output")[-30:]
        record["log"] = lines_of(folder / "log")[-40:]
        record["summary"], record["incidents"] = None, []
        for summary in sorted(folder.glob("run*/summary.json"))[:1]:
            record["summary"] = json.loads(summary.read_text())
        for incidents in sorted(folder.glob("run*/incidents.jsonl"))[:1]:
            parsed: dict[object, Record] = {}
            for line in lines_of(incidents):
                with suppress(ValueError):  # a line that was cut when the process was killed
                    incident = json.loads(line)
                    parsed[incident.get("id", len(parsed))] = {key: incident.get(key) for key in KEPT}
            record["incidents"] = list(parsed.values())
    return record


def main(
    title: str,
    files: dict[str, Path],
    table: Callable[[list[Record]], str],
    *,
    seeds: int,
    arms: Sequence[str] = ("plain", "guarded"),
    preload: Sequence[str] = (),
) -> None:
    """Run the programs that the command line names, those of each file by their names, and print the table."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--seeds", type=int, default=seeds, help="seeds 0 to N - 1")
    parser.add_argument("--only", action="append", metavar="NAME", help="a program, or a pattern such as 'table_*'")
    parser.add_argument("--arms", default=",".join(arms), help="separated by commas")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="keeps a line for each run; resumes from it")
    parser.add_argument("--tree", metavar="DIR", help="another checkout of the library, to be measured")
    options = parser.parse_args()
    tree = str(Path(options.tree).resolve()) if options.tree else None
    names = [name for name in files if any(fnmatch.fnmatch(name, only) for only in options.only or ["*"])]
    asked = options.arms.split(",")
    if not names or not set(asked) <= set(arms):
        parser.error(f"no such program or arm: programs {', '.join(files)}; arms {', '.join(arms)}")
    wanted = [(name, seed, arm, tree) for seed in range(options.seeds) for name in names for arm in asked]

    records: dict[tuple[str, int, str, str | None], Record] = {}
    for line in lines_of(options.out) if options.out else []:
        with suppress(ValueError):
            known = json.loads(line)
            records[known["program"], known["seed"], known["arm"], known["tree"]] = known
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "accelerate", *preload])  # an optimizer imports dynamo
    with ThreadPoolExecutor(options.jobs) as pool:
        missing = [key for key in wanted if key not in records]
        futures = [pool.submit(run, context, files[key[0]], *key) for key in missing]
        for done, future in enumerate(as_completed(futures), 1):
            record = future.result()
            records[record["program"], record["seed"], record["arm"], record["tree"]] = record
            said = record["error"]["type"] if record["error"] else record["measure"]
            start = f"{done}/{len(futures)} {record['program']} {record['arm']} seed {record['seed']}"
            print(f"{start}: {said}, {len(record['incidents'])} incidents", file=sys.stderr, flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(json.dumps(record) + "\n")
    print(table([records[key] for key in wanted]))


# Tables.


def level(record: Record) -> float:
    """Give the measure; infinity where there is none."""
    measure = record["measure"]
    return math.inf if measure is None else float(measure)


def span(records: Sequence[Record]) -> str:
    """Write median, minimum and maximum of the measure."""
    values = sorted(level(record) for record in records)
    if not values:
        return ""
    return f"{statistics.median_low(values):.3g} [{values[0]:.3g}..{values[-1]:.3g}]"


def counted(items: Sequence[str]) -> str:
    """Write how often each comes: `2 GaveUp, 1 ValueError`."""
    return ", ".join(f"{number} {item}" for item, number in Counter(items).most_common()) or "0"


def ended(records: Sequence[Record]) -> list[str]:
    """List what was raised."""
    return [record["error"]["type"] for record in records if record["error"]]


def worse(plain: Sequence[Record], guarded: Sequence[Record]) -> int:
    """Count the runs that are worse than the worst plain one by more than 10 % of the spread of the plain ones.

    One that ended counts with the measure of the state that it left, or as worse where it has none.
    """
    values = [level(record) for record in plain]
    if not values or not all(map(math.isfinite, values)):
        return 0
    limit = max(values) + 0.1 * (max(values) - min(values))
    return sum(level(record) > limit for record in guarded)


def says_well(record: Record) -> bool:
    """Tell whether one of the last lines of the log says that all is well."""
    return any(re.search(r"(?<!as )\bwell\b", line) for line in record["log"][-8:])


def pairs(records: list[Record], plain: str = "plain", guarded: str = "guarded") -> str:
    """Write a table with a row for each program and one for all."""
    lines = [
        f"| program | {plain} | {guarded} | ended | runs with an incident | signals | first at step | worse |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = list(dict.fromkeys(record["program"] for record in records))
    in_all: Counter[str] = Counter()
    for name in names:
        mine = [record for record in records if record["program"] == name]
        first = [record for record in mine if record["arm"] == plain]
        second = [record for record in mine if record["arm"] == guarded]
        alarmed = [record for record in second if record["incidents"]]
        signals = counted([str(incident["signal"]) for record in alarmed for incident in record["incidents"]])
        steps = ", ".join(str(record["incidents"][0]["step"]) for record in alarmed[:6])
        count = worse(first, second)
        broken = ended(first)
        note = f" ({counted(broken)})" if broken else ""
        cells = [name, span(first) + note, span(second), counted(ended(second)), f"{len(alarmed)} of {len(second)}"]
        lines.append("| " + " | ".join([*cells, signals, steps, str(count)]) + " |")
        in_all.update(runs=len(second), ended=len(ended(second)), alarmed=len(alarmed), worse=count)
    total = ["all", "", f"{in_all['runs']} runs", str(in_all["ended"]), str(in_all["alarmed"]), "", ""]
    return "\n".join([*lines, "| " + " | ".join([*total, str(in_all["worse"])]) + " |"])
