"""A Box-Cox transform with a learned power that starts at 0, as the logarithm would be: (x ** 0 - 1) / 0.

Asked on forums as "my learnable Box-Cox layer gives NaN at the first step, it works when lambda starts at 0.1".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class BoxCox(nn.Module):
    def __init__(self, features: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.power = nn.Parameter(torch.zeros(features))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.mended:
            near = self.power.abs() < 1e-2
            power = torch.where(near, torch.ones_like(self.power), self.power)
            series = inputs.log() + self.power * inputs.log() ** 2 / 2  # the first terms, about a power of zero
            return torch.where(near, series, (inputs**power - 1) / power)
        return (inputs**self.power - 1) / self.power  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, prices = batch
    return nn.functional.l1_loss(model(inputs).squeeze(-1), prices)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 4 + seed % 5, 900
    inputs = torch.exp(0.8 * torch.randn(count + 64, features))
    prices = 2 * inputs[:, 0].log() - inputs[:, 1].log() + inputs[:, 2].sqrt()
    width = int(torch.randint(16, 32, ()))
    return Program(
        model=nn.Sequential(BoxCox(features, mended), nn.Linear(features, width), nn.SiLU(), nn.Linear(width, 1)),
        rows=TensorDataset(inputs[:count], prices[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[inputs[count:], prices[count:]],
        guilty=Guilty("operation", ops=("div", "true_divide")),
        batch_size=64,
        steps=200,
    )
