"""A river gauge writes -9999 while it is iced over, and the table goes into training as it is.

Hydrological and weather archives (GRDC, NOAA, USGS) mark what is missing by -9999 or -999. A dozen windows in a
thousand hold it; everything stays finite, one such batch throws the weights far off, and Adam's second moments stay
large for hundreds of steps. "My loss is in the millions, the data look fine." The windows are left out.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Forecaster(nn.Module):
    """The level in some hours from the levels before."""

    def __init__(self, hours: int, channels: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, channels, 5, padding=2), nn.ReLU(), nn.Conv1d(channels, channels, 5, padding=2), nn.ReLU()
        )
        self.head = nn.Linear(channels * hours, 1)

    def forward(self, levels: Tensor) -> Tensor:
        return self.head(self.features(levels.unsqueeze(1)).flatten(1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    levels, later = batch
    return nn.functional.mse_loss(model(levels), later)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    hours, ahead, count = 24, 4, 1000
    rows = count + 96
    pace, start = 0.15 + 0.25 * torch.rand(rows, 1), 6.3 * torch.rand(rows, 1)
    swing = 1 + torch.rand(rows, 1)
    levels = swing * torch.sin(pace * torch.arange(hours + ahead) + start) + 0.05 * torch.randn(rows, hours + ahead)
    iced = torch.randperm(count)[: 10 + 2 * (seed % 4)].sort().values
    for row in iced.tolist():
        levels[row, int(torch.randint(4, hours, ())) :] = -9999.0
    kept = torch.ones(count, dtype=torch.bool)
    if mended:
        kept[iced] = False
    history, later = levels[:, :hours], levels[:, -1]
    return Program(
        model=Forecaster(hours, int(torch.randint(8, 14, ()))),
        rows=TensorDataset(history[:count][kept], later[:count][kept]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[history[count:], later[count:]],
        guilty=Guilty("data", rows=tuple(iced.tolist())),
        steps=280,
    )
