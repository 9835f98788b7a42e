"""Visitors of a museum in the next weeks by an interpretable N-BEATS, whose trend is a polynomial of the day.

In the paper time runs from 0 to 1 over the window. Here it is the number of the day, as `arange` gives it: the cube of
27 is 19683, forecasts of the first batch lie in the tens of thousands, and SGD throws the weights away at once. Asked
as "N-BEATS: the generic stack trains, the trend stack gives NaN".
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


def powers(days: int, degree: int, over_window: bool) -> Tensor:
    time = torch.arange(days, dtype=torch.float32)
    if over_window:
        time = time / days
    return torch.stack([time**power for power in range(degree + 1)])  # guilty


def waves(days: int, count: int) -> Tensor:
    angle = 2 * math.pi * torch.arange(days) / days
    return torch.cat([torch.stack([(k * angle).cos(), (k * angle).sin()]) for k in range(1, count + 1)])


class Block(nn.Module):
    """Explains a part of the window by one basis, and forecasts by the same basis."""

    back: Tensor
    ahead: Tensor

    def __init__(self, width: int, back: Tensor, ahead: Tensor) -> None:
        super().__init__()
        self.register_buffer("back", back, persistent=False)
        self.register_buffer("ahead", ahead, persistent=False)
        self.body = nn.Sequential(nn.Linear(back.shape[1], width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.thetas = nn.Linear(width, back.shape[0] + ahead.shape[0])

    def forward(self, window: Tensor) -> tuple[Tensor, Tensor]:
        back, ahead = self.thetas(self.body(window)).split([self.back.shape[0], self.ahead.shape[0]], dim=-1)
        return back @ self.back, ahead @ self.ahead


class NBeats(nn.Module):
    def __init__(self, days: int, coming: int, width: int, over_window: bool) -> None:
        super().__init__()
        trend = powers(days, 3, over_window), powers(coming, 3, over_window)
        season = waves(days, days // 7 + 1), waves(coming, coming // 7 + 1)
        self.blocks = nn.ModuleList(Block(width, *basis) for basis in (trend, trend, season, season))

    def forward(self, window: Tensor) -> Tensor:
        parts = []
        for block in self.blocks:
            back, ahead = block(window)
            window = window - back
            parts.append(ahead)
        return torch.stack(parts).sum(dim=0)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    window, coming = batch
    return nn.functional.mse_loss(model(window), coming)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    days, coming, count = 28, 14, 1200
    time = torch.arange(days + coming)
    slope = 1.5 * torch.randn(count + 128, 1) / days
    week = (0.5 + torch.rand(count + 128, 1)) * torch.sin(2 * math.pi * (time / 7 + torch.rand(count + 128, 1)))
    visitors = 0.5 * torch.randn(count + 128, 1) + slope * time + week + 0.2 * torch.randn(count + 128, days + coming)
    return Program(
        model=NBeats(days, coming, int(torch.randint(32, 64, ())), over_window=mended),
        rows=TensorDataset(visitors[:count, :days], visitors[:count, days:]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.01 + 0.005 * (seed % 3), momentum=0.9),
        evaluation=[visitors[count:, :days], visitors[count:, days:]],
        guilty=Guilty("explosion", ops=("pow", "matmul")),
        steps=400,
    )
