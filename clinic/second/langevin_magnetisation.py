"""A hand-written autograd function takes care of zero on the way forward and forgets it on the way back.

The Langevin function coth(x) - 1/x in a model of magnetisation curves. The limit at zero is treated with care; its
derivative is the difference of two infinities there, and every sweep of the field passes through zero.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Langevin(torch.autograd.Function):
    """coth(x) - 1/x"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mended: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.mended = mended
        result = x / 3
        far = x.abs() > 1e-2
        result[far] = 1 / torch.tanh(x[far]) - 1 / x[far]
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if ctx.mended:
            slope = torch.full_like(x, 1 / 3)
            far = x.abs() > 1e-2
            slope[far] = 1 / x[far].square() - 1 / torch.sinh(x[far]).square()
        else:
            slope = 1 / x.square() - 1 / torch.sinh(x).square()  # guilty
        return grad * slope, None


class Ferrofluid(nn.Module):
    """The composition of a sample tells its saturation and its magnetic moment."""

    def __init__(self, composition: int, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.body = nn.Sequential(nn.Linear(composition, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, composition: Tensor, field: Tensor) -> Tensor:
        saturation, moment = F.softplus(self.body(composition)).unbind(-1)
        return saturation * Langevin.apply(moment * field, self.mended)  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    composition, field, magnetisation = batch
    return F.mse_loss(model(composition, field), magnetisation)


def measured(composition: Tensor, field: Tensor) -> Tensor:
    x = (1.5 + composition[:, 0].abs()) * field.double()
    curve = torch.where(x.abs() < 1e-3, x / 3, 1 / torch.tanh(x) - 1 / x).nan_to_num()
    return (2 + composition[:, 1].sin()) * curve.float()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    kinds, width = int(torch.randint(3, 7, ())), int(torch.randint(24, 40, ()))
    samples, held_out = int(torch.randint(40, 60, ())), 8
    reach = int(torch.randint(10, 16, ()))
    sweep = 0.3 * torch.arange(-reach, reach + 1)
    composition = torch.randn(samples + held_out, kinds).repeat_interleave(len(sweep), dim=0)
    field = sweep.repeat(samples + held_out)
    magnetisation = measured(composition, field) + 0.01 * torch.randn(len(field))
    rows = samples * len(sweep)
    return Program(
        model=Ferrofluid(kinds, width, mended),
        rows=TensorDataset(composition[:rows], field[:rows], magnetisation[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[composition[rows:], field[rows:], magnetisation[rows:]],
        guilty=Guilty("operation", ops=("reciprocal", "div", "rdiv", "sub", "Langevin")),
    )
