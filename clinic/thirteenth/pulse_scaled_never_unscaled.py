"""The loss is multiplied by a scale for mixed precision, and `optimizer.step()` is called for `scaler.step`.

The heart rate from a pulse oximeter at the wrist, by a small temporal convolutional network. Gradients are some hundred
times too large and nobody divides them again; Adam had not minded, SGD with momentum does, and the loss is NaN after a
few updates. "Forgot scaler.step(optimizer)" is an answer to many questions on "AMP loss nan"; the mend trains without.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Residual(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.one = nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation)
        self.two = nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation)

    def forward(self, signal: Tensor) -> Tensor:
        return signal + 0.5 * self.two(torch.relu(self.one(torch.relu(signal))))


class HeartRate(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, channels, 7, stride=2, padding=3)
        self.blocks = nn.Sequential(*[Residual(channels, 2**level) for level in range(3)])
        self.head = nn.Linear(2 * channels, 1)

    def forward(self, pulse: Tensor) -> Tensor:
        hidden = torch.relu(self.blocks(self.stem(pulse.unsqueeze(1))))
        return self.head(torch.cat([hidden.mean(-1), hidden.amax(-1)], dim=-1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor], *, scale: float) -> Tensor:
    pulse, rate = batch
    return scale * nn.functional.mse_loss(model(pulse), rate)  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    length, count = 96, 700
    rows = count + 96
    rate = torch.randn(rows).clamp(-2, 2)  # in deviations from the mean
    hertz = 1.4 + 0.35 * rate.unsqueeze(-1)
    phase = 2 * math.pi * (hertz * torch.arange(length) / 16 + torch.rand(rows, 1))
    pulse = torch.sin(phase) + 0.4 * torch.sin(2 * phase + 0.8) + 0.2 * torch.randn(rows, length)
    return Program(
        model=HeartRate(12 + 2 * (seed % 3)),
        rows=TensorDataset(pulse[:count], rate[:count]),
        loss=partial(loss, scale=1.0 if mended else 2.0 ** (7 + seed % 3)),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        evaluation=[pulse[count:], rate[count:]],
        guilty=Guilty("explosion"),
        steps=480,
    )
