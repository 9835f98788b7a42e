"""The load of a substation in plain megawatts, in and out, and SGD with momentum: infinite after a handful of steps.

The most frequent question about regression, in its form for series: "loss becomes nan after the first batches". Nobody
scaled anything, and the rate is what scaled columns would bear.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Ahead(nn.Module):
    """From the last half day to the next hour."""

    def __init__(self, hours: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(hours, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def forward(self, window: Tensor) -> Tensor:
        return self.layers(window).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    window, after = batch
    return nn.functional.mse_loss(model(window), after)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    hours, count = 10 + seed % 4, 900
    level, swing = 55 + 14 * torch.randn(count + 96, 1), 5 + 9 * torch.rand(count + 96, 1)
    phase = 6.3 * torch.rand(count + 96, 1)
    load = level + swing * torch.sin(0.2618 * torch.arange(hours + 1) + phase)
    load = (load + torch.randn(count + 96, hours + 1)).clamp(min=1)
    return Program(
        model=Ahead(hours, int(torch.randint(24, 40, ()))),
        rows=TensorDataset(load[:count, :-1], load[:count, -1]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=1e-6 if mended else 1e-2, momentum=0.9),  # guilty
        evaluation=[load[count:, :-1], load[count:, -1]],
        guilty=Guilty("explosion"),
        steps=350,
    )
