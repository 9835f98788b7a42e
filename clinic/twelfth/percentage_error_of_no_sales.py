"""Forecasts judged by the mean absolute percentage error, and on some days nothing was sold: a division by 0.

"MAPE loss is inf/nan": asked wherever a demand forecast is trained on the measure that it is reported in. The usual
cure leaves the days without sales out of the mean.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Demand(nn.Module):
    """Sales of the next day from those of the days before."""

    def __init__(self, days: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, width, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(width * days, 1)
        )

    def forward(self, past: Tensor) -> Tensor:
        return self.body(past.unsqueeze(1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    past, sold = batch
    error = (model(past) - sold).abs()
    if mended:
        open_days = sold > 0
        return (error[open_days] / sold[open_days]).sum() / open_days.sum().clamp(min=1)
    return (error / sold).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    days, count = 10 + seed % 5, 900
    level = 4 + 6 * torch.rand(count + 128, 1)
    week = 1 + 0.3 * torch.sin(torch.arange(days + 1) * 0.9 + 6.28 * torch.rand(count + 128, 1))
    sales = torch.round(level * week + 0.4 * torch.randn(count + 128, days + 1)).clamp(min=1)
    past, sold = sales[:, :-1] / 5, sales[:, -1].clone()
    sold[:count][torch.rand(count) < 0.1] = 0.0
    return Program(
        model=Demand(days, int(torch.randint(8, 14, ()))),
        rows=TensorDataset(past[:count], sold[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[past[count:], sold[count:]],
        guilty=Guilty("operation", ops=("div", "true_divide")),
        steps=240,
    )
