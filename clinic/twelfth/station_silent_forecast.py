"""Hourly temperatures in which -999.9 stands for "the station was silent": read as a number, it is forecast as one.

The habit of weather archives (GHCN, NOAA, DWD write -9999, 999.9 or -999): the reader of the file makes no NaN of it,
and the squared error of a few rows outweighs all others.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

SILENT = -999.9
MEAN, SPREAD = 11.0, 7.0


class Dilated(nn.Module):
    """Three dilated convolutions over the last day and a forecast of the next hours."""

    def __init__(self, channels: int, ahead: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 3, padding=2, dilation=2),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 3, padding=4, dilation=4, stride=4),
            nn.ReLU(),
        )
        self.head = nn.Linear(6 * channels, ahead)

    def forward(self, window: Tensor) -> Tensor:
        return self.head(self.body(window.unsqueeze(1)).flatten(1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    window, after = batch
    return nn.functional.mse_loss(model(window), after)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    ahead, count = 2 + seed % 3, 1000
    hours = 24 + ahead
    season, swing = 6 * torch.randn(count + 96, 1), 2 + 3 * torch.rand(count + 96, 1)
    phase = 6.3 * torch.rand(count + 96, 1)
    series = MEAN + season + swing * torch.sin(0.2618 * torch.arange(hours) + phase)
    series = series + 0.5 * torch.randn(count + 96, hours)
    bad = torch.randperm(count)[: 22 + int(torch.randint(8, ()))]
    series[bad, 24 + torch.randint(ahead, (len(bad),))] = SILENT
    scaled = (series - MEAN) / SPREAD
    window, after = scaled[:, :24], scaled[:, 24:]
    keep = torch.ones(count, dtype=torch.bool)
    if mended:
        keep[bad] = False
    return Program(
        model=Dilated(int(torch.randint(8, 14, ())), ahead),
        rows=TensorDataset(window[:count][keep], after[:count][keep]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[window[count:], after[count:]],
        guilty=Guilty("data", rows=tuple(sorted(bad.tolist()))),
        steps=300,
    )
