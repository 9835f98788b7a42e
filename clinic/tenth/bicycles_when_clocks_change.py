"""Bicycles on a bridge, hour by hour: a PatchTST sees two days and forecasts the third.

The counts were cut into calendar days, so the day on which clocks go forward has 23 hours and the one on which they go
back has 25. A window that holds one of them is an hour short or long, and the data set cannot bring it into shape:
"shape '[48, 1]' is invalid for input of size 47". Asked wherever local time is grouped by date.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PatchTSTConfig, PatchTSTForPrediction

from clinic.program import Guilty, Program

HOURS = 24


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Two days and the day that follows them."""

    def __init__(self, days: list[Tensor]) -> None:
        self.days = days

    def __len__(self) -> int:
        return len(self.days) - 2

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        past = torch.cat(self.days[row : row + 2]).reshape(2 * HOURS, 1)
        return past, self.days[row + 2].reshape(HOURS, 1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    past, coming = batch
    return nn.functional.mse_loss(model(past_values=past).prediction_outputs, coming)


def counts(days: int) -> Tensor:
    """Hundreds of bicycles an hour: two rush hours on working days, one hill at weekends, better and worse weather."""
    hour, day = torch.arange(HOURS), torch.arange(days).unsqueeze(-1)
    rush = torch.exp(-((hour - 8) ** 2) / 3) + torch.exp(-((hour - 17) ** 2) / 5)
    hill = 0.8 * torch.exp(-((hour - 14) ** 2) / 18)
    weather = 1.5 + 0.3 * torch.sin(2 * math.pi * (day + 5) / 11)
    return weather * torch.where(day % 7 < 5, rush, hill) + 0.05 * torch.randn(days, HOURS).abs()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    days, held = 520 + 40 * (seed % 3), 90
    days_of = list(counts(days + held))
    first = 40 + int(torch.randint(60, ()))
    clocks = [first, first + 217, first + 364]
    if not mended:
        for forward, day in zip((True, False, True), clocks, strict=True):
            whole = days_of[day]
            days_of[day] = torch.cat([whole[:2], whole[3:]]) if forward else torch.cat([whole[:3], whole[2:]])
    coming = Windows(days_of[days:])
    past, next_day = zip(*(coming[row] for row in range(len(coming))), strict=True)
    config = PatchTSTConfig(
        num_input_channels=1,
        context_length=2 * HOURS,
        prediction_length=HOURS,
        patch_length=8,
        patch_stride=8,
        d_model=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        head_dropout=0.0,
    )
    return Program(
        model=PatchTSTForPrediction(config),
        rows=Windows(days_of[:days]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        evaluation=[torch.stack(past), torch.stack(next_day)],
        guilty=Guilty("data", rows=tuple(row for row in range(days - 2) if {row, row + 1, row + 2} & set(clocks))),
        batch_size=16,
        steps=250,
    )
