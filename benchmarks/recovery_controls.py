"""The loop of the tutorials, with a drill in it: what becomes of a run that nobody looks after."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import torch
from plain_loop import factor
from torch.optim.lr_scheduler import LambdaLR

from resilient_train.command.build import Run, parameter_groups
from resilient_train.command.config import compose
from resilient_train.extensions.drills import Drill, parse


def by_hand(run: Run, *, skips: bool) -> tuple[int, int]:
    """Train; return how many steps were made of how many. A step that is skipped is gone."""
    accelerator, model, steps = run.world.accelerator, run.model, run.config.run.steps
    drill = Drill(parse(run.config.drill, steps=steps))
    optimizer = own_optimizer(run)
    schedule, weights, accepted = LambdaLR(optimizer, partial(factor, steps=steps)), list(model.parameters()), 0
    for tick in range(1, steps + 1):
        update = run.guard.samples.next_update()
        drill.tick = tick
        (batch,) = update.batches
        drill.spoiled("state", SimpleNamespace(model=model, optimizers=[optimizer]))
        loss, _ = run.objective(model, drill.spoiled("batch", batch))
        accelerator.backward(drill.spoiled("loss", loss))
        drill.spoiled("gradients", weights)
        norm = accelerator.clip_grad_norm_(weights, 1.0)
        hot = drill.rate_factor()
        for group in optimizer.param_groups:
            group["lr"] *= hot
        if not skips or (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            optimizer.step()
            accepted += 1
        schedule.step()
        optimizer.zero_grad()
    return accepted, steps


def own_optimizer(run: Run) -> torch.optim.Optimizer:
    """One like the guard's, which nobody looks after."""
    node = dict(run.config.optimizer)
    groups = parameter_groups(run.bare_model, no_decay=node.pop("no_decay"))
    optimizer: torch.optim.Optimizer = compose.build("optimizer", node, groups)
    return optimizer
