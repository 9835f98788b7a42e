"""A few windows of a sensor hold NaN where the radio link was down, and batch normalisation remembers them.

Condition monitoring of machines. To leave out the update of such a batch is not enough: its forward pass has already
put NaN into the running statistics, and the model is lost as soon as it is evaluated.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Monitor(nn.Module):
    """Tells the state of a machine by its vibrations."""

    def __init__(self, sensors: int, channels: int, states: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(sensors, channels, 5, stride=2),
            nn.BatchNorm1d(channels),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 3, stride=2),
            nn.BatchNorm1d(channels),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(channels, states),
        )

    def forward(self, windows: Tensor) -> Tensor:
        return self.body(windows)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    windows, state = batch
    return nn.functional.cross_entropy(model(windows), state)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    sensors, length, states = int(torch.randint(2, 5, ())), int(torch.randint(40, 56, ())), 4
    rows, held_out = int(torch.randint(800, 1400, ())), 128
    state = torch.randint(states, (rows + held_out,))
    phase = 2 * math.pi * torch.rand(rows + held_out, sensors, 1)
    speed = (0.25 + 0.3 * state).view(-1, 1, 1)
    windows = torch.sin(speed * torch.arange(length) + phase) + 0.5 * torch.randn(rows + held_out, sensors, length)
    rotten = sorted(torch.randperm(rows)[: int(torch.randint(2, 6, ()))].tolist())
    for row in rotten:
        sensor, begin = int(torch.randint(sensors, ())), int(torch.randint(length - 8, ()))
        if not mended:
            windows[row, sensor, begin : begin + 8] = math.nan
    return Program(
        model=Monitor(sensors, int(torch.randint(12, 20, ())), states),
        rows=TensorDataset(windows[:rows], state[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        evaluation=[windows[rows:], state[rows:]],
        guilty=Guilty("data", rows=tuple(rotten)),
        steps=200,
    )
