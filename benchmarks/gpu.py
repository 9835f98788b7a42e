"""What a guard costs on a GPU, in one command of at most 9 minutes; what it cures there is in `tests/gpu`.

GPT-2 with 124 M weights in bf16, or what `--tiny` makes of it, which a CPU can do as well; there, parts that only CUDA
has are left out, and said to be. Every ratio is from blocks of steps that take turns in one process.

    python benchmarks/gpu.py --json figures.json
    python benchmarks/gpu.py --tiny --parts step snapshot
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_loops import Guarded, Plain, Size, paired, settle, timed, with_snapshots
from interleaved import table, with_interval


class Bench:
    """Where to measure, and how long."""

    def __init__(self, device: torch.device, size: Size, *, blocks: int, steps: int) -> None:
        self.device, self.size, self.blocks, self.steps = device, size, blocks, steps

    def guarded(self, **options: Any) -> Guarded:
        """Make a guarded loop on this device."""
        return Guarded(self.device, self.size, **options)

    def compare(self, how: str = "fused", *, compiles: bool = False, accumulation: int = 1, **options: Any) -> Any:
        """Compare a guarded step with a plain one, of as many rows."""
        size = replace(self.size, batch=self.size.batch // accumulation)
        plain = Plain(self.device, size, how, compiles=compiles, accumulation=accumulation)
        ours = Guarded(self.device, size, how=how, compiles=compiles, accumulation=accumulation, **options)
        figures = paired(plain, ours, self.device, blocks=self.blocks, steps=self.steps)
        ours.close()
        return figures


def step(bench: Bench) -> dict[str, Any]:
    """A guarded step beside a plain one."""
    kinds: dict[str, dict[str, Any]] = {
        "eager, fused AdamW": {},
        "compiled, fused AdamW": {"compiles": True},
        "eager, accumulation 4": {"accumulation": 4},
        "eager, foreach AdamW": {"how": "foreach"},
        "eager, SGD": {"how": "sgd"},
        "eager, checks=paranoid": {"checks": "paranoid"},
    }
    if bench.device.type == "cpu":
        del kinds["compiled, fused AdamW"]
    return {name: bench.compare(**options) for name, options in kinds.items()}


def waits(bench: Bench) -> dict[str, Any]:
    """Count on CUDA's own check that no step between two lines waits for the device."""
    ours = bench.guarded()
    ours.run(4 * bench.steps)
    settle(bench.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            ours.guard.step(next(ours.updates))
        found = "none in 100 steps"
    except RuntimeError as error:
        found = str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"host waits": found}


def snapshot(bench: Bench) -> dict[str, Any]:
    """A snapshot beside a copy of its bytes to pinned memory, hidden behind the next forward, and a rewind."""
    ours = bench.guarded(memory=with_snapshots(10**6))
    ours.run(2 * bench.steps)
    ring, state = ours.guard._ring, ours.guard.state
    tensors = list(ours.model.parameters())
    tensors += [one for kept in state.optimizers[0].state.values() for one in kept.values() if one.ndim]
    is_cuda = bench.device.type == "cuda"
    room = [torch.empty_like(one, device="cpu", pin_memory=is_cuda) for one in tensors]
    takes, copies, restores = list[float](), list[float](), list[float]()
    for number in range(bench.blocks + 2):
        with timed(bench.device, copies):
            for target, source in zip(room, tensors, strict=True):
                target.copy_(source.detach(), non_blocking=True)
        with timed(bench.device, takes):
            taken = ring.take(10**6 + number, verified=True)
            ring.copier.before_change()
        assert taken is not None
        with timed(bench.device, restores):
            ring.restore(taken)
    ours.close()
    del ours, ring, state, tensors, taken
    often = bench.guarded(memory=with_snapshots(2))
    never = bench.guarded(memory=with_snapshots(10**6))
    hidden = paired(never, often, bench.device, blocks=bench.blocks, steps=bench.steps)
    size = sum(one.nbytes for one in room)
    return {
        "MiB": size / 2**20,
        "take beside copy": float(np.median(np.array(takes[2:]) / np.array(copies[2:]))),
        "restore beside copy": float(np.median(np.array(restores[2:]) / np.array(copies[2:]))),
        "copy ms": 1e3 * float(np.median(copies[2:])),
        "a step with a snapshot every 2": hidden,
    }


PARTS: dict[str, tuple[Callable[[Bench], dict[str, Any]], bool]] = {  # and whether only CUDA has it
    "step": (step, False),
    "waits": (waits, True),
    "snapshot": (snapshot, False),
}


def rows_of(figures: dict[str, Any], name: str = "") -> list[list[str]]:
    """Lay figures out as rows of a table."""
    if "ratio" in figures:
        plain, ours = figures["ms"]
        return [[name, f"{plain:.2f} ms", f"{ours:.2f} ms", with_interval(figures["ratio"])]]
    rows = []
    for key, value in figures.items():
        where = f"{name}: {key}" if name else key
        if isinstance(value, dict):
            rows += rows_of(value, where)
        else:
            rows.append([where, "", "", f"{value:.3f}" if isinstance(value, float) else str(value)])
    return rows


def main() -> None:
    """Measure, print, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description="Measure what a guard costs on a GPU.")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--tiny", action="store_true", help="a model of 0.03 M weights, for a CPU")
    parser.add_argument("--blocks", type=int, default=20, help="of each loop (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=25, help="in a block (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no part after this (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args()
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    print(f"{name}, torch {torch.__version__}", flush=True)
    figures: dict[str, Any] = {"device": name, "torch": torch.__version__}
    size = Size().smaller() if given.tiny else Size()
    bench = Bench(device, size, blocks=given.blocks, steps=given.steps)
    for part in given.parts:
        measure, needs_cuda = PARTS[part]
        why = "needs CUDA" if needs_cuda and device.type != "cuda" else ""
        if time.perf_counter() - began > 60 * given.minutes:
            why = "no time left"
        if not why:
            try:
                figures[part] = measure(bench)
            except Exception as error:  # the other parts are worth their figures nevertheless
                why = f"failed: {type(error).__name__}: {error}"
        if why:
            figures[part] = {"not measured": why}
        print(f"\n{part} ({time.perf_counter() - began:.0f} s)")
        print(table(["", "plain", "guarded", ""], rows_of(figures[part])), flush=True)
        if given.json:
            given.json.write_text(json.dumps(figures, indent=1) + "\n")
    if any("failed" in str(one.get("not measured")) for one in figures.values() if isinstance(one, dict)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
