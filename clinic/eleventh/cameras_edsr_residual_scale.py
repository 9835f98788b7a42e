"""EDSR without the scale of its residuals: each block adds what its two convolutions give, at full strength.

The paper multiplies it by 0.1, since with many features training is "numerically unstable" otherwise; reimplementations
leave it out, and the loss of the first updates grows without bound. Pictures of a thermal camera are to be sharpened.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Block(nn.Module):
    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.scale = scale
        for convolution in (self.first, self.second):
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.second(F.relu(self.first(x)))


class EDSR(nn.Module):
    def __init__(self, blocks: int, width: int, scale: float) -> None:
        super().__init__()
        self.head = nn.Conv2d(1, width, 3, padding=1)
        self.body = nn.Sequential(*[Block(width, scale) for _ in range(blocks)])
        self.tail = nn.Sequential(nn.Conv2d(width, 4, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, small: Tensor) -> Tensor:
        features = self.head(small)
        return self.tail(features + self.body(features))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    small, sharp = batch
    return F.mse_loss(model(small), sharp)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, size = int(torch.randint(500, 700, ())), 96, 12
    noise = torch.randn(rows + held_out, 1, 5, 5)
    warm = F.interpolate(noise, size=size, mode="bicubic")
    sharp = torch.tanh(4 * warm)
    small = F.avg_pool2d(sharp, 2)
    return Program(
        model=EDSR(blocks=6, width=16, scale=0.1 if mended else 1.0),  # guilty
        rows=TensorDataset(small[:rows], sharp[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=3e-2, momentum=0.9),
        evaluation=[small[rows:], sharp[rows:]],
        guilty=Guilty("explosion"),
        batch_size=16,
        steps=240,
    )
