"""What is each decision of the library worth: which programs are won with it, and which without?

    python benchmarks/worth.py pass --out worth.jsonl              # every program once: which names acted in it
    python benchmarks/worth.py goals --out worth.jsonl             # what would be good, where a name changed the end
    python benchmarks/worth.py without NAME ... --out worth.jsonl  # again without a name, where it acted
    python benchmarks/worth.py without --rare 3 --out worth.jsonl  # each name that acted in at most three, by itself

A name that did not act in a run cannot have changed it: the run is not made again. All calls go on where they were
interrupted.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import math
import multiprocessing
import os
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import worth_names
import worth_table

LIMIT = 200  # seconds of CPU
Record = dict[str, Any]
Wanted = tuple[list[Any], int, list[str], bool]  # a program, its seed, the names that are off, whether it is its goal


def child(sender: Any, kind: str, arguments: list[Any], seed: int, without: list[str], is_goal: bool) -> None:
    """Make one run in a process of its own."""
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 5))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    import warnings

    import torch
    import worth_programs

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    worth_names.off.update(without)
    worth_names.acted.clear()
    began = time.process_time()
    record: Record = {}
    try:
        value = worth_programs.made(kind, arguments, seed, is_goal)
        record = {"goal": value} if is_goal else value
    except BaseException as error:
        record = {"value": None, "ended": f"harness: {type(error).__name__}: {error}"}
    for key in ("value", "goal"):
        if isinstance(record.get(key), float) and math.isnan(record[key]):
            record[key] = None
    record |= {"acted": sorted(worth_names.acted), "cpu": round(time.process_time() - began, 1)}
    sender.send(record)


def run(context: Any, kind: str, arguments: list[Any], seed: int, without: list[str], is_goal: bool) -> Record:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(sender, kind, arguments, seed, without, is_goal))
    process.start()
    sender.close()
    try:
        record: Record = receiver.recv()
    except EOFError:
        record = {"value": None, "ended": "killed", "acted": []}
    process.join(10)
    process.kill()
    arm = "goal" if is_goal else "run"
    return {"unit": [kind, *arguments], "seed": seed, "without": without, "arm": arm} | record


def key(unit: list[Any], seed: int, without: list[str], arm: str) -> str:
    return json.dumps([unit, seed, without, arm])


def kept(path: Path) -> dict[str, Record]:
    records = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        one = json.loads(line)
        records[key(one["unit"], one["seed"], one["without"], one["arm"])] = one
    return records


def carry_out(wanted: list[Wanted], out: Path, jobs: int) -> None:
    records = kept(out)
    missing = [one for one in wanted if key(one[0], one[1], one[2], "goal" if one[3] else "run") not in records]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "accelerate", "worth_programs"])
    began = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run, context, unit[0], unit[1:], seed, off, goal) for unit, seed, off, goal in missing]
        for count, future in enumerate(as_completed(futures), 1):
            record = future.result()
            with out.open("a") as lines:
                lines.write(json.dumps(record) + "\n")
            took = f"{count} of {len(missing)}, {time.monotonic() - began:.0f} s"
            what = f"{record['unit']} seed {record['seed']} {record.get('value', record.get('goal'))}"
            print(f"{took}: {what} {str(record.get('ended') or '')[:80]}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pass", "goals", "without"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="a name, or a pattern")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="programs, such as 'clinic first *'")
    parser.add_argument("--rare", type=int, default=0, metavar="N", help="each name that acted in at most N programs")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    worth_names.install()
    import worth_programs

    every = [[kind, *arguments] for kind, arguments in worth_programs.units()]
    every = [unit for unit in every if fnmatch.fnmatch(" ".join(map(str, unit)), given.only)]
    records = kept(given.out)
    wanted: list[Wanted] = []
    if given.what in ("pass", "goals"):
        is_goal = given.what == "goals"
        wanted = [(unit, seed, [], is_goal) for seed in range(given.seeds) for unit in every]
        wanted = [one for one in wanted if one[1] == 0 or one[0][0] not in worth_programs.ONE_SEED]
        if is_goal:
            differing = worth_table.Worth(given.out.read_text()).differing()
            wanted = [one for one in wanted if tuple(one[0]) in differing]
    else:
        apart = [[name] for name in worth_table.Worth(given.out.read_text()).rare(given.rare)] if given.rare else []
        for seed, names, unit in itertools.product(range(given.seeds), apart or [sorted(given.names)], every):
            base = records.get(key(unit, seed, [], "run"))
            if base is not None and not {*names}.isdisjoint(base["acted"]):
                wanted.append((unit, seed, names, False))
    print(f"{len(wanted)} runs", file=sys.stderr)
    carry_out(wanted, given.out, given.jobs)


if __name__ == "__main__":
    main()
