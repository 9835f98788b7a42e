"""Kernel regression of rain from the gauges around, as in the textbook: exp(-d^2) weights, divided by their sum.

The widths are learned. A farm that lies far from every gauge has weights that are all too small for a float, and zero
is divided by zero; the narrower the kernels get, the more. `softmax` of the same exponents has no such trouble.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class KernelRegression(nn.Module):
    def __init__(self, gauges: Tensor, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.register_buffer("gauges", gauges)
        self.sharpness = nn.Parameter(torch.zeros(len(gauges)))
        self.level = nn.Parameter(torch.zeros(len(gauges)))
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, place: Tensor) -> Tensor:
        square = ((place[:, None] - self.gauges) * self.scale).square().sum(-1)
        exponent = -square * self.sharpness.exp()
        if self.mended:
            return torch.softmax(exponent, 1) @ self.level
        weight = torch.exp(exponent)
        return torch.div((weight * self.level).sum(1), weight.sum(1))  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    place, rain = batch
    return nn.functional.mse_loss(model(place), rain)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, gauges = int(torch.randint(900, 1100, ())), 200, int(torch.randint(36, 50, ()))
    place = 6 * torch.rand(rows + held_out, 2)
    far = torch.randperm(rows)[: int(torch.randint(5, 10, ()))]
    place[far] += torch.tensor([15.0, 12.0]) * (1 + torch.rand(len(far), 1))
    hills = 6 * torch.rand(5, 2)
    height = torch.exp(-(place[:, None] - hills).square().sum(-1)).sum(1)
    rain = 3 * height + torch.sin(place[:, 0]) + 0.1 * torch.randn(rows + held_out)
    return Program(
        model=KernelRegression(6 * torch.rand(gauges, 2), mended),
        rows=TensorDataset(place[:rows], rain[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-2),
        evaluation=[place[rows:], rain[rows:]],
        guilty=Guilty("operation", ops=("div", "exp")),
        steps=240,
    )
