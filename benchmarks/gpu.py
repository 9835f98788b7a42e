"""All that a GPU has to show, in one command of at most 9 minutes: costs beside plain PyTorch, and cures.

GPT-2 with 124 M weights in bf16, or what `--tiny` makes of it, which a CPU can do as well; there, parts that only CUDA
has are left out, and said to be. Every ratio is from blocks of steps that take turns in one process.

    python benchmarks/gpu.py --json figures.json
    python benchmarks/gpu.py --tiny --parts step snapshot
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from gpu_loops import Guarded, Plain, Size, losses_of, paired, scratch, settle, timed, with_snapshots
from interleaved import table, with_interval
from torch import Tensor


class Bench:
    """Where to measure, and how long."""

    def __init__(self, device: torch.device, size: Size, folder: str, *, blocks: int, steps: int) -> None:
        self.device, self.size, self.folder, self.blocks, self.steps = device, size, folder, blocks, steps

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


def breaks_at(row: int) -> Callable[[Any, Any], Tensor]:
    """Return an objective with an operation that breaks for one row, whose slope is 1/0 there."""

    def objective(model: Any, batch: Any) -> Tensor:
        losses = losses_of(model, batch)
        share = losses * (batch[2] != row)
        return losses.mean() + 1e-3 * torch.log(share).mean()

    return objective


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


def diagnosis(bench: Bench) -> dict[str, Any]:
    """What it takes to find an operation that breaks, and bad rows, in steps' time; then armor's cost."""
    found: dict[str, Any] = {}
    faults: dict[str, dict[str, Any]] = {
        "operation": {"objective": breaks_at(3)},
        "rows": {"bad": frozenset({17, 99})},
    }
    for name, options in faults.items():
        ours = bench.guarded(**options, run_dir=scratch(bench.folder, name))
        ours.run(5)
        seconds: list[float] = []
        before = ours.guard.clock.tick
        with timed(bench.device, seconds):
            while ours.guard.clock.tick < before + 600 and not ours.guard.incidents:
                ours.run(10)
        ours.run(20)
        incidents = ours.guard.incidents
        plain_ms = 1e3 * _median_step(ours, bench)
        found[name] = {
            "incidents": len(incidents),
            "cause": incidents[0].diagnosis.cause if incidents else "none",
            "line": _line(incidents[0]) if incidents else "",
            "rows": list(incidents[0].diagnosis.rows) if incidents else [],
            "steps of time": 1e3 * incidents[0].seconds / plain_ms if incidents else None,
        }
        ours.close()
    return found


def _line(incident: Any) -> str:
    culprit = incident.diagnosis.culprit
    return f"{Path(culprit.file).name}:{culprit.line} {culprit.op}" if culprit is not None else ""


def _median_step(ours: Guarded, bench: Bench) -> float:
    seconds: list[float] = []
    for _ in range(5):
        with timed(bench.device, seconds):
            ours.run(bench.steps)
    return float(np.median(seconds)) / bench.steps


def armor(bench: Bench) -> dict[str, Any]:
    """A step with a patched line beside the same step without. Each is of a copy of this file: a patch is of a file."""
    loops = []
    for name, row in (("bare", -1), ("patched", 3)):
        copied = shutil.copy(__file__, scratch(bench.folder, f"{name}.py"))
        spec = importlib.util.spec_from_file_location(name, copied)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        loops.append(bench.guarded(objective=module.breaks_at(row)))
    bare, patched = loops
    for _ in range(60):
        patched.run(10)
        if patched.guard.incidents:
            break
    figures = paired(bare, patched, bench.device, blocks=bench.blocks, steps=bench.steps)
    return {"incidents": len(patched.guard.incidents), "step": figures}


def half(bench: Bench) -> dict[str, Any]:
    """fp16 with a GradScaler: overflows are no incidents, and a loss of NaN is one."""

    def in_half(model: Any, batch: Any) -> Tensor:
        return losses_of(model, batch, None).mean()

    figures: dict[str, Any] = {}
    for name, bad in (("healthy", frozenset[int]()), ("bad rows", frozenset({17, 99}))):
        ours = bench.guarded(
            objective=in_half, precision="fp16", bad=bad, run_dir=scratch(bench.folder, f"half {name}")
        )
        ours.run(270)  # an epoch, and some
        newest = ours.guard.newest
        figures[name] = {
            "incidents": [one.diagnosis.cause for one in ours.guard.incidents],
            "loss": newest.loss if newest is not None else None,
        }
        ours.close()
    return figures


def memory(bench: Bench) -> dict[str, Any]:
    """Out of memory: the update is made again with smaller micro-batches."""
    torch.cuda.empty_cache()
    ours = bench.guarded()
    ours.run(3)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(bench.device).total_memory
    torch.cuda.set_per_process_memory_fraction(0.8 * torch.cuda.max_memory_allocated() / total)
    try:
        ours.run(5)
        slicing = ours.guard.samples.slicing
        return {"batch": bench.size.batch, "micro-batch": slicing.batch_size, "accumulation": slicing.accumulation}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def device_assert(bench: Bench) -> dict[str, Any]:
    """A token out of range fails on the device, which ends the process: the next one passes it over."""
    codes: list[int] = []
    child = [sys.executable, __file__, "--child", str(scratch(bench.folder, "assert"))]
    began = time.perf_counter()
    while len(codes) < 6 and (not codes or codes[-1]):
        codes.append(subprocess.run(child, check=False, capture_output=True, timeout=240).returncode)
    return {"exit codes": codes, "seconds": time.perf_counter() - began}


def train_with_bad_token(run_dir: Path) -> None:
    """Train in this process over rows of which one has a token that the embedding lacks."""
    device, size = torch.device("cuda"), Size().smaller()

    def objective(model: Any, batch: Any) -> Tensor:
        tokens, weights, index = batch
        wrong = torch.where(weights[:, None].isnan(), 10**6, tokens)
        return losses_of(model, (wrong, weights.nan_to_num(1.0), index)).mean()

    steps = 2_000
    ours = Guarded(
        *(device, size), objective=objective, bad=frozenset({17}), steps=steps, run_dir=run_dir, disk=50, resume=True
    )
    for batch in ours.updates:
        ours.guard.step(batch)


PARTS: dict[str, tuple[Callable[[Bench], dict[str, Any]], bool]] = {  # and whether only CUDA has it
    "step": (step, False),
    "waits": (waits, True),
    "snapshot": (snapshot, False),
    "diagnosis": (diagnosis, False),
    "armor": (armor, False),
    "half": (half, True),
    "memory": (memory, True),
    "assert": (device_assert, True),
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
    parser = argparse.ArgumentParser(description="Measure what a guard costs and cures on a GPU.")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--tiny", action="store_true", help="a model of 0.03 M weights, for a CPU")
    parser.add_argument("--blocks", type=int, default=20, help="of each loop (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=25, help="in a block (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no part after this (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        train_with_bad_token(given.child)
        return
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    print(f"{name}, torch {torch.__version__}", flush=True)
    figures: dict[str, Any] = {"device": name, "torch": torch.__version__}
    with TemporaryDirectory(prefix="gpu-") as folder:
        size = Size().smaller() if given.tiny else Size()
        bench = Bench(device, size, folder, blocks=given.blocks, steps=given.steps)
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
