"""The loops that people write by hand: as in a tutorial, and with the one line that skips what is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from clips import Clip
from program import Program
from torch import Tensor
from torch.utils.data import DataLoader


def batches(program: Program, seed: int) -> Iterator[Any]:
    """Yield shuffled batches without end."""
    generator = torch.Generator().manual_seed(seed)
    loader: DataLoader[Any] = DataLoader(
        program.rows,
        batch_size=program.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=program.collate,
        generator=generator,
    )
    while True:
        yield from loader


def autocast(program: Program) -> AbstractContextManager[Any]:
    """What forward and loss are computed in."""
    return torch.autocast("cpu", torch.bfloat16) if program.bf16 else nullcontext()


def train(program: Program, seed: int, *, skips: bool = False, clip: Clip | None = None) -> dict[str, Tensor]:
    """Train as a tutorial does and return the weights. With `skips`, an update that is not finite is left out.

    `clip` takes the place of the program's own clipping.
    """
    torch.manual_seed(seed)
    model, source = program.model.train(), batches(program, seed)
    weights = list(model.parameters())
    optimizer = program.optimizer(weights)
    for _ in range(program.steps):
        batch = next(source)
        with autocast(program):
            loss = program.loss(model, batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        norm = clip(weights) if clip else float(torch.nn.utils.clip_grad_norm_(weights, program.clip or math.inf))
        if not skips or (math.isfinite(loss.item()) and math.isfinite(norm)):
            optimizer.step()
    return model.state_dict()
