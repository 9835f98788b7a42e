"""The loss of night photographs is taken after the mu-law, log(1 + 5000 x): a pixel just below zero has no logarithm.

Merging and denoising of high dynamic range pictures. The network adds a correction to what the sensor saw; it begins
as zero, and the first updates push dark pixels below black.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

MU = 5000


class Denoiser(nn.Module):
    """A small UNet."""

    def __init__(self, channels: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.enter = nn.Conv2d(1, channels, 3, padding=1)
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.leave = nn.Conv2d(2 * channels, 1, 3, padding=1)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def tone_mapped(self, image: Tensor) -> Tensor:
        if self.mended:
            image = image.clamp(min=0)
        return torch.log(1 + MU * image) / math.log(1 + MU)  # guilty

    def forward(self, noisy: Tensor) -> Tensor:
        fine = self.enter(noisy).relu()
        coarse = self.up(self.down(fine).relu()).relu()
        return self.tone_mapped(noisy + self.leave(torch.cat([fine, coarse], dim=1)))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    noisy, clean = batch
    return nn.functional.mse_loss(model(noisy), torch.log(1 + MU * clean) / math.log(1 + MU))


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, count = 16, 400
    lamps = torch.rand(count + 64, 1, side // 4, side // 4) ** 4
    clean = nn.functional.interpolate(lamps, size=(side, side), mode="bilinear") + 0.002
    noisy = (clean + (0.04 + 0.02 * (seed % 3)) * torch.randn_like(clean)).clamp(min=0)
    return Program(
        model=Denoiser(int(torch.randint(8, 14, ())), mended),
        rows=TensorDataset(noisy[:count], clean[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[noisy[count:], clean[count:]],
        guilty=Guilty("operation", ops=("log",)),
        batch_size=16,
        steps=300,
    )
