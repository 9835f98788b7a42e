"""The loops that people write by hand: as in a tutorial, and with the one line that skips what is not finite."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from clinic import clips
from clinic.program import Program
from clinic.score import Run

SOURCES = (Path(str(clips.__file__)),)


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


def train(program: Program, seed: int, *, skips: bool = False, clip: clips.Clip | None = None) -> dict[str, Tensor]:
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


def plain(program: Program, seed: int, run: Run) -> None:
    """Train as a tutorial does."""
    _counted(program, seed, run, skips=False)


def skip(program: Program, seed: int, run: Run) -> None:
    """The same, without the updates whose loss or gradient norm is not finite."""
    _counted(program, seed, run, skips=True)


def skip_and_clip(program: Program, seed: int, run: Run) -> None:
    _counted(program, seed, run, skips=True, clip=clips.GlobalNorm())


def skip_and_adagc(program: Program, seed: int, run: Run) -> None:
    _counted(program, seed, run, skips=True, clip=clips.AdaGC())


def skip_and_zclip(program: Program, seed: int, run: Run) -> None:
    _counted(program, seed, run, skips=True, clip=clips.ZClip())


def _counted(program: Program, seed: int, run: Run, *, skips: bool, clip: clips.Clip | None = None) -> None:
    landed = 0

    def counted(weights: Iterable[nn.Parameter]) -> Optimizer:
        def count(*_: Any) -> None:
            nonlocal landed
            landed += 1

        made = program.optimizer(weights)
        made.register_step_post_hook(count)
        return made

    train(dataclasses.replace(program, optimizer=counted), seed, skips=skips, clip=clip)
    run.lost = program.steps - landed
