"""The worst error of an antenna's pattern, smoothed as a p-norm: mean(|error|^20)^(1/20), over decibels.

An error of thirty decibels to the power of twenty still fits into a float. Some angles lie in a null of the pattern, at
minus a hundred and sixty: beyond 84 the power is infinite, and its slope is infinity times zero. Filter and antenna
people use such norms in double precision and in numbers near one; there the formula is harmless.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

P = 20


def p_norm(error: Tensor, mended: bool) -> Tensor:
    size = error.abs()
    if mended:
        most = size.max().detach()
        return most * torch.pow(size / most, P).mean() ** (1 / P)
    return torch.pow(size, P).mean() ** (1 / P)  # guilty


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    setting, decibels = batch
    return p_norm(10 * model(setting).squeeze(1) - decibels, mended)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, elements = int(torch.randint(1200, 1500, ())), 200, int(torch.randint(3, 5, ()))
    angle = math.pi * (torch.rand(rows + held_out) - 0.5)
    steered = 0.5 * (torch.rand(rows + held_out) - 0.5)
    lag = math.pi * (angle.sin() - steered.sin())
    field = torch.polar(torch.ones(rows + held_out, elements), lag[:, None] * torch.arange(elements)).mean(1).abs()
    decibels = 20 * torch.log10(field + 0.02)
    nulls = torch.randperm(rows)[: int(torch.randint(6, 11, ()))]
    decibels[nulls] = -160 + 5 * torch.randn(len(nulls))
    setting = torch.stack([angle, steered, angle.sin(), steered.sin()], 1)
    width = int(torch.randint(48, 80, ()))
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    return Program(
        model=model,
        rows=TensorDataset(setting[:rows], decibels[:rows]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[setting[rows:], decibels[rows:]],
        guilty=Guilty("overflow", ops=("pow",)),
        batch_size=64,
        steps=300,
    )
