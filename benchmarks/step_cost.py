"""What a step of ours costs beside a step of the plain loop, as a ratio from one interleaved run.

Each loop lives in a process of its own and gets leave for one block of steps at a time, in the order plain, ours,
ours, plain. The one that waits is stopped with all of its threads, so the two never compete, and whatever else the
machine does hits both alike. Fresh pairs of processes share out the blocks: where memory happens to lie can make a
process some per cent faster for all of its life.

Then come counts, which do not vary from run to run: torch calls and host reads of 20 steps.

    python benchmarks/step_cost.py
    python benchmarks/step_cost.py --workload mlp --tracking mlflow --json figures.json
    python benchmarks/step_cost.py --ours plain                       (what the method sees where nothing differs)
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import plain_loop
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from resilient_train.assemble import assemble
from resilient_train.config.compose import load
from resilient_train.events import Vitals
from resilient_train.ranks.world import World
from resilient_train.record import tracking
from resilient_train.record.console import Display, Terminal
from resilient_train.train import train

OVERRIDES = {
    "gpt": "model=gpt model.layers=5 model.width=256 model.context=128 data=python_source data.batch_size=2",
    "mlp": "model=mlp data=digits objective=classification",
}
STEPS_PER_BLOCK = {"gpt": 10, "mlp": 300}
WARM_UP = {"gpt": 20, "mlp": 600}
COUNTED = 20
NEVER = 10**9
OnStep = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """What a process is to train."""

    workload: str
    steps: int
    log_every: int
    tracking: str


# ------------------------------------------------------------------------------------------------------- the two loops


def plain(job: Job, on_step: OnStep, tell: Callable[[Any], None]) -> None:
    """Train with the hand-written loop."""
    workload = plain_loop.WORKLOADS[job.workload]
    prepared = plain_loop.prepare(workload, job.steps)
    tell(_work(prepared.model, [prepared.optimizer], workload.batch_size))
    plain_loop.train(workload, prepared, steps=job.steps, log_every=job.log_every, on_step=on_step)


def ours(job: Job, on_step: OnStep, tell: Callable[[Any], None]) -> None:
    """Train as `python -m resilient_train` does, its lines and its log file included."""
    settings = [f"run.steps={job.steps}", f"run.log_every={job.log_every}", f"tracking={job.tracking}"]
    composed = load([*OVERRIDES[job.workload].split(), *settings, "data.eval._target_=null"])
    config = composed.config
    world = World(config.accelerate)
    with TemporaryDirectory(prefix="step_cost-") as scratch:
        terminal = Terminal(is_main=True)
        terminal.log_to(Path(scratch, "train.log"))
        tracker = tracking.build(config.tracking, "step_cost", Path(scratch))
        run = assemble(config, world)
        tell(_work(run.model, run.updater.optimizers, run.slicing.samples))
        train(run, _Counted(terminal.display(steps=job.steps, done=0), on_step), tracker)
        tracker.finish("completed")
        terminal.close()


class _Counted:
    """A display that also tells the benchmark of every step."""

    def __init__(self, display: Display, on_step: OnStep) -> None:
        self.display, self.on_step = display, on_step

    def step(self, step: int) -> None:
        self.display.step(step)
        self.on_step(step)

    def show(self, vitals: Vitals) -> None:
        self.display.show(vitals)

    def close(self) -> None:
        self.display.close()


LOOPS = {"plain": plain, "ours": ours}


def _work(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], samples: int) -> dict[str, Any]:
    """Say what a loop works on, so that nobody compares different work."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    same = ("weight_decay", "betas", "eps", "fused")
    return {
        "weights": sum(weight.numel() for weight in model.parameters()),
        "samples": samples,
        "device": str(next(model.parameters()).device),
        "groups": [{"weights": len(group["params"]), **{key: group[key] for key in same}} for group in groups],
    }


# ---------------------------------------------------------------------------------------------------------- in a child


def child(loop: str, job: Job, blocks: int, steps_per_block: int, pipe: Connection) -> None:
    """Run blocks of steps, each when told to, and answer with the seconds it took."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    warm_up = job.steps - blocks * steps_per_block
    started = 0.0

    def on_step(step: int) -> None:
        nonlocal started
        if step >= warm_up and (step - warm_up) % steps_per_block == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            pipe.send(time.perf_counter() - started)
            pipe.recv()
            started = time.perf_counter()

    LOOPS[loop](job, on_step, pipe.send)


def counting_child(loop: str, job: Job, pipe: Connection) -> None:
    """Count what the last steps of a short run ask of torch."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    calls, reads = _Calls(), Counter[str]()
    modes = (calls, _Reads(reads))

    def on_step(step: int) -> None:
        if step == job.steps - COUNTED:
            for mode in modes:
                mode.__enter__()
        elif step == job.steps:
            for mode in reversed(modes):
                mode.__exit__(None, None, None)

    LOOPS[loop](job, on_step, pipe.send)
    pipe.send({"torch_calls": calls.count / COUNTED, "host_reads": dict(reads + calls.reads)})


class _Calls(TorchDispatchMode):
    """Counts what reaches torch's kernels, forward, backward and optimizer alike."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.reads = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero") and _lives_on_device(args[0]):
            self.reads[name] += 1
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    """Counts reads that are no call of torch's on a CPU; on a GPU they wait like the others."""

    def __init__(self, reads: Counter[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "cpu", "__array__") and _lives_on_device(args[0]):
            self.reads[name] += 1
        return func(*args, **(kwargs or {}))


def _lives_on_device(tensor: Any) -> bool:
    """Tell what a GPU run would keep there from what the host owns anyway: orders of rows, states of generators."""
    return isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or not tensor.is_cpu)
