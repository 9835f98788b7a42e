"""What a snapshot in memory costs, and going back to one, beside a plain copy of the same bytes.

The state is that of a GPT after its first update: weights, AdamW's two moments, generators, settings. `flat` copies
one tensor of as many bytes, `per tensor` copies the tensors of the state one after the other; each has as many places
to copy to as the ring has slots. All four take turns, block by block, in fresh processes.

    python benchmarks/snapshot.py
    python benchmarks/snapshot.py --size 4M --blocks 100 --json figures.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interleaved import answer, begin, median_with_interval, quiet, spawn, table, with_interval

SIZES = {"4M": "model.layers=5 model.width=256", "25M": "model.layers=8 model.width=512"}
SLOTS = 2
TARGET = 1.3  # times a flat copy
WAYS = ("flat", "per tensor", "take", "restore")


def ways(size: str) -> tuple[dict[str, Callable[[], Any]], int]:
    """Every way to copy a run's state by its name, and the bytes of the state."""
    from resilient_train.command.build import assemble
    from resilient_train.command.config.compose import load
    from resilient_train.core.ring import Ring
    from resilient_train.core.tree import taken_apart
    from resilient_train.data.trees import nbytes
    from resilient_train.durable.incident_log import IncidentLog
    from resilient_train.ground.reader import MemoryConfig
    from resilient_train.loop.reporter import Place
    from resilient_train.processes.world import World

    small = "model=gpt model.context=128 data=python_source data.batch_size=1 data.eval._target_=null tracking=none"
    config = load([*small.split(), *SIZES[size].split(), "run.steps=1", "checkpoint.memory.every=0"]).config
    guard = assemble(config, World.joined(config.accelerate), Place(IncidentLog(None))).guard
    for batch in guard.batches(steps=1):
        guard.step(batch)  # the moments come to be
    state = guard.state
    ring = Ring(state, MemoryConfig(every=1, keep=SLOTS, max_gib=None))
    live = state.live()
    bytes_held = nbytes(live)
    sources = [one.detach() for one in taken_apart(live)[1]]
    copies = cycle([[torch.empty_like(one) for one in sources] for _ in range(SLOTS)])
    flat_source = torch.ones(bytes_held // 4)
    flat_copies = cycle([torch.empty_like(flat_source) for _ in range(SLOTS)])
    steps = iter(range(1, 10**9))

    def per_tensor() -> None:
        for target, source in zip(next(copies), sources, strict=True):
            target.copy_(source)

    def take() -> None:
        if ring.take(next(steps), verified=True) is None:
            raise SystemExit("the ring took no snapshot: too little memory is free")

    def restore() -> None:
        ring.restore(ring.snapshots[-1])

    for _ in range(SLOTS):
        take()
    ways = {"flat": lambda: next(flat_copies).copy_(flat_source), "per tensor": per_tensor}
    return {**ways, "take": take, "restore": restore}, bytes_held


def child(size: str, blocks: int, pipe: Connection) -> None:
    """Time every way once a block, forth and back; answer with [block, way] milliseconds and the bytes of the state."""
    quiet()
    by_name, bytes_held = ways(size)
    ms = np.zeros((blocks, len(WAYS)))
    for block in range(-3, blocks):  # in the first ones memory is touched for the first time
        order = range(len(WAYS)) if block % 2 == 0 else reversed(range(len(WAYS)))
        for place in order:
            started = time.perf_counter()
            by_name[WAYS[place]]()
            if block >= 0:
                ms[block, place] = 1e3 * (time.perf_counter() - started)
    pipe.send((ms, bytes_held))


def measure(size: str, blocks: int, rounds: int) -> dict[str, Any]:
    """Time one size in fresh processes, and print its table."""
    measured = []
    for fresh in np.array_split(np.arange(blocks), rounds):
        process, pipe = spawn(child, size, len(fresh))
        ms, bytes_held = answer(pipe, "snapshot")
        measured.append(ms)
        process.join()
    print(f"\nGPT of {size} weights, {bytes_held / 1e6:.0f} MB of state, {blocks} blocks,", end=" ")
    print(f"load now {os.getloadavg()[0]:.1f}")
    figures: dict[str, Any] = {"bytes": bytes_held, "ms": {}, "beside_flat": {}}
    rows = []
    for place, way in enumerate(WAYS):
        mine = np.concatenate([ms[:, place] for ms in measured])
        ratios = [median_with_interval([ms[:, place] / ms[:, other] for ms in measured]) for other in (0, 1)]
        told = ["1" if place == other else with_interval(ratio) for other, ratio in enumerate(ratios)]
        rows.append([way, f"{np.median(mine):.2f}", f"{bytes_held / np.median(mine) / 1e6:.1f}", *told])
        figures["ms"][way], figures["beside_flat"][way] = mine.tolist(), ratios[0]
    print(table(["way", "ms", "GB/s", "beside flat", "beside per tensor"], rows))
    worst = max(figures["beside_flat"][way][2] for way in ("take", "restore"))
    print(
        f"  target: at most {TARGET:.1f} times a flat copy: {'met' if worst <= TARGET else 'missed'} with {worst:.3f}"
    )
    return figures


def main() -> None:
    """Measure, print, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description="Compare taking and restoring a snapshot with copying its bytes.")
    parser.add_argument("--size", action="append", choices=list(SIZES), help="weights of the GPT (default: all)")
    parser.add_argument("--blocks", type=int, metavar="N", default=60, help="turns of each way (default: %(default)s)")
    parser.add_argument("--rounds", type=int, metavar="N", default=3, help="fresh processes (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args()
    figures: dict[str, Any] = {"machine": begin()}
    for size in given.size or list(SIZES):
        figures[size] = measure(size, given.blocks, given.rounds)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
