"""A linear autoregression is trained on its own forecasts over a long horizon: errors grow as a power of the horizon.

Forecasting of hourly load. Once the coefficients add up to a little more than one, the last forecast of the horizon is
huge, its slope is larger still, and one more step puts the coefficients where the forecast is infinite.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Autoregression(nn.Module):
    """The next value from the last ones."""

    def __init__(self, lags: int, horizon: int, free_running: bool) -> None:
        super().__init__()
        self.lags, self.horizon, self.free_running = lags, horizon, free_running
        self.next = nn.Linear(lags, 1)
        nn.init.zeros_(self.next.weight)

    def forward(self, series: Tensor) -> Tensor:
        """What to expect after each of the last values."""
        if not self.free_running:
            return self.next(series[:, :-1].unfold(1, self.lags, 1)).squeeze(-1)
        seen = series[:, : self.lags]
        for _ in range(self.horizon):
            seen = torch.cat([seen, self.next(seen[:, -self.lags :])], dim=1)
        return seen[:, self.lags :]


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (series,) = batch
    return F.mse_loss(model(series), series[:, model.lags :])


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    lags, horizon = int(torch.randint(8, 13, ())), int(torch.randint(64, 81, ()))
    rows, held_out = int(torch.randint(500, 900, ())), 96
    hours = torch.arange(lags + horizon) + 24 * torch.rand(rows + held_out, 1)
    day, half_day = torch.sin(2 * math.pi * hours / 24), torch.sin(4 * math.pi * hours / 24 + 1)
    size = 0.5 + torch.rand(rows + held_out, 1)
    series = size * (day + 0.4 * half_day) + 0.1 * torch.randn(rows + held_out, lags + horizon)
    return Program(
        model=Autoregression(lags, horizon, free_running=not mended),
        rows=TensorDataset(series[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        evaluation=[series[rows:]],
        guilty=Guilty("explosion"),
        steps=150,
    )
