"""The loops that are measured, each as a process of its own runs it: hand-written ones, and ours."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import plain_loop
import torch
from interleaved import Job, Loop, OnStep

OVERRIDES = {
    "gpt": "model=gpt model.layers=5 model.width=256 model.context=128 data=python_source data.batch_size=2",
    "mlp": "model=mlp data=digits objective=classification",
    "tiny": "data.batch_size=1",  # the language model that the command trains by default, of 0.86 M weights
}


def plain(
    job: Job,
    on_step: OnStep,
    tell: Callable[[Any], None],
    *,
    fused: bool | None = True,
) -> None:
    """Train with the hand-written loop."""
    workload = plain_loop.WORKLOADS[job.workload]
    prepared = plain_loop.prepare(workload, job.steps, fused=fused)
    tell(work(prepared.model, [prepared.optimizer], workload.batch_size))
    plain_loop.train(workload, prepared, steps=job.steps, log_every=job.log_every, on_step=on_step)


def ours(job: Job, on_step: OnStep, tell: Callable[[Any], None]) -> None:
    """Train as `python -m resilient_train` does: its guard, its lines and its log file included."""
    _by_command(job, on_step, tell)


def unchecked(job: Job, on_step: OnStep, tell: Callable[[Any], None]) -> None:
    """Train as `ours`, without checks, policy and snapshots."""
    _by_command(job, on_step, tell, "checks=off", "recovery=off", "checkpoint.memory.every=0")


def _by_command(job: Job, on_step: OnStep, tell: Callable[[Any], None], *changed: str) -> None:
    from resilient_train.command.build import assemble, train
    from resilient_train.command.config.compose import load
    from resilient_train.command.terminal import Terminal
    from resilient_train.durable.incident_log import IncidentLog
    from resilient_train.loop.reporter import Place
    from resilient_train.processes.world import World
    from resilient_train.report import tracker as tracking
    from resilient_train.report.connection import UploadCursor

    with TemporaryDirectory(prefix="step_cost-") as scratch:
        settings = [f"run.steps={job.steps}", f"run.log_every={job.log_every}", "data.eval._target_=null"]
        shown = [f"tracking={job.tracking}", f"tracking.uri=sqlite:///{scratch}/mlflow.db"]
        where = [f"accelerate.cpu={'ACCELERATE_USE_CPU' in os.environ}"]  # as several processes on a CPU need it
        config = load([*OVERRIDES[job.workload].split(), *settings, *shown, *where, *changed]).config
        world = World.joined(config.accelerate)
        terminal = Terminal(is_main=True)
        terminal.log_to(Path(scratch, "train.log"))
        directory = Path(scratch, "step_cost")
        tracker = tracking.build(config.tracking, directory, Path(scratch))
        run = assemble(config, world, Place(IncidentLog(None), tracker=tracker))
        optimizers = run.guard.state.optimizers
        tell(work(run.model, optimizers, run.guard.samples.slicing.samples // world.size))

        attempts = itertools.count(1)

        def settled() -> None:
            step = next(attempts)
            while step == job.warm_up and job.tracking == "mlflow" and UploadCursor(directory).run is None:
                time.sleep(0.1)  # MLflow's import and its new database belong to the start, not to a step
            on_step(step)

        run.beat = settled
        train(run)
        tracker.finish()
        terminal.close()
        if run.guard.incidents:
            raise SystemExit(f"a healthy run met {len(run.guard.incidents)} incidents: no figure of it would be right")


def work(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], samples: int) -> dict[str, Any]:
    """Say what a loop works on, so that nobody compares different work."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {
        "weights": sum(weight.numel() for weight in model.parameters()),
        "samples": samples,
        "device": str(next(model.parameters()).device),
        "groups": [
            {"weights": len(group["params"]), **{key: group[key] for key in ("weight_decay", "betas", "eps")}}
            for group in groups
        ],
    }


LOOPS: dict[str, Loop] = {
    "plain": plain,
    "default": functools.partial(plain, fused=None),  # torch's own choice of form for AdamW
    "ours": ours,
}
