"""Generalised-mean pooling over feature maps that may be negative: they have no power that is not a whole number.

The `clamp(min=eps)` of the usual implementations was dropped; open-mmlab/mmpretrain#677 has it behind a switch.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class GeM(nn.Module):
    def __init__(self, power: float, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.power = nn.Parameter(torch.tensor(power))

    def forward(self, maps: Tensor) -> Tensor:
        if self.mended:
            maps = maps.clamp(min=1e-4)
        return maps.pow(self.power).mean(dim=-1).pow(1 / self.power)  # guilty


class Retrieval(nn.Module):
    def __init__(self, channels: int, classes: int, mended: bool) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv1d(2, channels, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 3, padding=1),
        )
        self.pool = GeM(3.0, mended)
        self.head = nn.Linear(channels, classes)

    def forward(self, signals: Tensor) -> Tensor:
        return self.head(self.pool(self.backbone(signals)))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    signals, labels = batch
    return nn.functional.cross_entropy(model(signals), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    classes, length, count = 3 + seed % 3, 24, 800
    labels = torch.randint(classes, (count + 96,))
    pitch = 0.25 + 0.3 * labels[:, None, None]
    ticks = torch.arange(length) + 10 * torch.rand(count + 96, 1, 1)
    signals = torch.cat([torch.sin(pitch * ticks), torch.cos(pitch * ticks)], dim=1)
    signals = signals + 0.3 * torch.randn_like(signals)
    return Program(
        model=Retrieval(int(torch.randint(12, 20, ())), classes, mended),
        rows=TensorDataset(signals[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[signals[count:], labels[count:]],
        guilty=Guilty("operation", ops=("pow",)),
        steps=200,
    )
