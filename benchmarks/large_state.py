"""What snapshots and checkpoints of a large state cost: the mean step, the longest step, and the memory.

A GPT whose weights and AdamW moments take a gigabyte, on all cores, beside the same loop written by hand. Each loop has
a process of its own, runs a block of steps at a time, and is stopped with all of its threads while another one runs, so
a checkpoint that is being written slows down its own loop only. There is one snapshot, or checkpoint, in each block.

    python benchmarks/large_state.py
    python benchmarks/large_state.py --layers 26 --blocks 6 --json figures.json      (2 GiB)
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from interleaved import answer, median_with_interval, spawn, table, with_interval
from torch.utils.data import DataLoader

from resilient_train.zoo.data import PythonSource
from resilient_train.zoo.models import GPT
from resilient_train.zoo.objectives import language_model

WIDTH, HEADS, CONTEXT = 768, 12, 64
WARM_UP = 5  # blocks: the memory of each slot is touched for the first time in them
EACH = {"snapshots": 25, "checkpoints": 20}  # steps of a block
GIB = 2**30

OnStep = Callable[[], None]


def made(layers: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the same model and optimizer for every loop."""
    torch.manual_seed(0)
    net = GPT(context=CONTEXT, layers=layers, heads=HEADS, width=WIDTH)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)


def train_plain(layers: int, steps: int, on_step: OnStep) -> None:
    """Train with a loop written by hand."""
    net, adam = made(layers)
    batches = iter(DataLoader(PythonSource(context=CONTEXT), batch_size=1, shuffle=True))
    for _ in range(steps):
        loss, _ = language_model(net, next(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        on_step()


def train_guarded(memory: int, disk: int, layers: int, steps: int, on_step: OnStep) -> None:
    """Train with a guard."""
    from resilient_train import Guard
    from resilient_train.reader import MemoryConfig

    net, adam = made(layers)
    with TemporaryDirectory(dir=Path.cwd()) as scratch:
        guard = Guard(
            *(None, net, adam),
            objective=language_model,
            data=PythonSource(context=CONTEXT),
            batch_size=1,
            steps=steps,
            clip=1.0,
            run_dir=Path(scratch, "run"),
            memory=MemoryConfig(every=memory, keep=4, max_gib=None),
            disk=disk,
        )
        for batch in guard.batches():
            guard.step(batch)
            on_step()


LOOPS: dict[str, Callable[[int, int, OnStep], object]] = {
    "plain": train_plain,
    "guarded, no copies": partial(train_guarded, 0, 0),
    "a snapshot every 25 steps": partial(train_guarded, EACH["snapshots"], 0),
    "and a checkpoint every 20": partial(train_guarded, EACH["checkpoints"], EACH["checkpoints"]),
}


def in_child(name: str, layers: int, each: int, blocks: int, scratch: str, pipe: Connection) -> None:
    """Run a block of steps whenever asked to, and answer with the seconds of each and the peak of memory so far."""
    os.chdir(scratch)  # which is not this process's to remove: it is killed in the end
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    seconds: list[float] = []
    done, began = 0, time.perf_counter()

    def on_step() -> None:
        nonlocal done, began
        seconds.append(time.perf_counter() - began)
        done += 1
        if done >= WARM_UP * each and done % each == 0:
            pipe.send((seconds[-each:], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB))
            seconds.clear()
            pipe.recv()
        began = time.perf_counter()

    LOOPS[name](layers, (WARM_UP + blocks) * each + 1, on_step)


def each_of(name: str) -> int:
    """Return the steps of a block of a loop."""
    return EACH["checkpoints" if "checkpoint" in name else "snapshots"]


def measure(layers: int, blocks: int, names: list[str], scratch: str) -> dict[str, Any]:
    """Time blocks of all loops in turn. Returns seconds by loop, [block][step], and the peaks of memory."""
    children = {name: spawn(in_child, name, layers, each_of(name), blocks, scratch) for name in names}

    def asked(name: str, *, is_first: bool = False) -> Any:
        process, pipe = children[name]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGCONT)
        if not is_first:
            pipe.send(None)
        answered = answer(pipe, name)
        os.kill(process.pid, signal.SIGSTOP)
        return answered

    found: dict[str, list[Any]] = {name: [] for name in names}
    peaks: dict[str, float] = {}
    try:
        for process, _ in children.values():
            os.kill(process.pid or 0, signal.SIGSTOP)
        for name in names:
            asked(name, is_first=True)
            print(f"  {name}: warm", file=sys.stderr, flush=True)
        for number in range(blocks):
            for name in names if number % 2 == 0 else names[::-1]:
                seconds, peaks[name] = asked(name)
                found[name].append(seconds)
            print(f"  block {number + 1} of {blocks}", file=sys.stderr, flush=True)
    finally:
        for process, _ in children.values():
            process.kill()
            process.join()
    return {"seconds": found, "peak_gib": peaks}


def main() -> None:
    """Measure, print a table, and write the figures if asked to."""
    parser = argparse.ArgumentParser(
        description="Compare a guard that copies a large state with a plain loop.",
        epilog="Takes some 8 minutes, and 12 GiB of memory, with what is given by default.",
    )
    parser.add_argument("--layers", type=int, default=13, help="of 7 M weights (default: %(default)s, 1 GiB of state)")
    parser.add_argument("--blocks", type=int, default=8, help="of 20 or 25 steps, of each loop (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=[*LOOPS], default=[*LOOPS], help="loops to run (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args()
    net, _ = made(given.layers)
    weights = sum(one.numel() for one in net.parameters())
    print(f"{weights / 1e6:.0f} M weights, {12 * weights / GIB:.2f} GiB of state, {os.cpu_count()} cores, ", end="")
    print(f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}", flush=True)
    names = list(dict.fromkeys(["plain", *given.only]))
    with TemporaryDirectory(prefix="large_state-", dir=Path.cwd(), ignore_cleanup_errors=True) as scratch:
        figures = measure(given.layers, given.blocks, names, scratch)
    rows = []
    for name in names:
        blocks, beside = (np.array(figures["seconds"][one]) for one in (name, "plain"))
        means = median_with_interval([blocks.mean(1) / beside.mean(1)])
        longest = np.median(blocks.max(1) / np.median(blocks))
        rows.append([name, f"{1e3 * np.median(blocks):.0f}", with_interval(means), f"{longest:.2f}"])
        rows[-1] += [f"{blocks.max() / np.median(blocks):.2f}", f"{figures['peak_gib'][name]:.2f}"]
    title = ["loop", "median step ms", "mean step beside plain", "longest of a block / median", "longest of all"]
    print(table([*title, "peak GiB"], rows))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
