"""The Accelerate loop that one would write by hand: what our own is measured against.

It borrows model, data set and objective from the zoo, so that both loops do the same work, and nothing else of ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from resilient_train.zoo.data import digits, python_source
from resilient_train.zoo.models import GPT, MLP
from resilient_train.zoo.objectives import classification, language_model


@dataclass(frozen=True)
class Workload:
    """What is trained."""

    model: Callable[[], nn.Module]
    data: Callable[[], Dataset[Any]]
    objective: Callable[[Any, Any], Any]
    batch_size: int


WORKLOADS = {
    "gpt": Workload(lambda: GPT(layers=5, width=256, context=128), python_source, language_model, batch_size=2),
    "tiny": Workload(GPT, python_source, language_model, batch_size=1),
    "mlp": Workload(MLP, digits, classification, batch_size=32),
}
LR, WARMUP_STEPS, FINAL_FACTOR = 1e-3, 20, 0.1


@dataclass(frozen=True)
class Prepared:
    """What the loop works with."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any
    scheduler: Any


def prepare(workload: Workload, steps: int, *, fused: bool | None = True) -> Prepared:
    """Build everything, as the tutorials of Accelerate do; `fused` None leaves torch the choice of AdamW's form."""
    set_seed(0)
    accelerator = Accelerator()
    model = workload.model()
    weights = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": 0.1},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, fused=fused)

    scheduler = LambdaLR(optimizer, partial(factor, steps=steps))
    return Prepared(accelerator, *accelerator.prepare(model, optimizer, loader(workload), scheduler))


def factor(step: int, steps: int) -> float:
    """Return the rate as a share of its peak: a warm-up, then half a cosine, as our configuration begins with."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = min(1.0, (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
    return FINAL_FACTOR + (1 - FINAL_FACTOR) * 0.5 * (1 + math.cos(math.pi * progress))


def loader(workload: Workload) -> DataLoader[Any]:
    """Shuffle and batch the rows."""
    # drop_last: a short batch at the end of an epoch would be less work than our updates, which are all full
    return DataLoader(workload.data(), batch_size=workload.batch_size, shuffle=True, drop_last=True)


def train(
    workload: Workload,
    prepared: Prepared,
    *,
    steps: int,
    log_every: int,
    on_step: Callable[[int], None] | None = None,
) -> None:
    """Train for `steps` updates; `on_step` hears of each."""
    accelerator, model, optimizer = prepared.accelerator, prepared.model, prepared.optimizer
    model.train()
    step = 0
    while step < steps:
        for batch in prepared.loader:
            loss, _ = workload.objective(model, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            prepared.scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % log_every == 0:
                print(f"step {step}/{steps}  loss {loss.item():.4f}", flush=True)
            if on_step is not None:
                on_step(step)
            if step == steps:
                break
