"""Nowcasting rain with a U-Net and a loss on the power spectrum, so that forecasts are not blurred.

The logarithm of the power of each wave is compared, and on a tile where no rain fell the power is exactly zero. The
logarithm is minus infinity there. Many papers on weather networks add such a term, and radar tiles are mostly dry.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

SIZE, PAST = 24, 3


def pair(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1), nn.SiLU()
    )


class UNet(nn.Module):
    """Down twice and up twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.third = pair(PAST, width), pair(width, 2 * width), pair(2 * width, 2 * width)
        self.fourth, self.fifth = pair(4 * width, width), pair(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, past: Tensor) -> Tensor:
        fine = self.first(past)
        middle = self.second(F.max_pool2d(fine, 2))
        coarse = self.third(F.max_pool2d(middle, 2))
        up = self.fourth(torch.cat([F.interpolate(coarse, scale_factor=2), middle], dim=1))
        up = self.fifth(torch.cat([F.interpolate(up, scale_factor=2), fine], dim=1))
        return self.head(up).squeeze(1)


def loss(model: nn.Module, batch: list[Tensor], floor: float) -> Tensor:
    past, rain = batch
    guess = model(past)
    power_of_guess, power = (torch.fft.rfft2(item, norm="ortho").abs().square() for item in (guess, rain))
    sharp = ((power_of_guess + floor).log() - (power + floor).log()).square().mean()  # guilty
    return F.mse_loss(guess, rain) + 0.02 * sharp


def tiles(count: int, dry: float) -> tuple[Tensor, Tensor]:
    """Showers that drift over the tile."""
    grid = torch.arange(SIZE).float()
    start, drift = SIZE * torch.rand(count, 4, 2, 1), 3 * torch.randn(count, 1, 2, 1)
    time = torch.arange(PAST + 1)
    at = (start + drift * time).transpose(-1, -2)  # count, showers, time, 2
    wide = 1.5 + 2 * torch.rand(count, 4, 1, 1)
    lines = [(-((grid - at[..., axis, None] + SIZE / 2) % SIZE - SIZE / 2).square() / wide**2).exp() for axis in (0, 1)]
    rain = torch.einsum("ksty,kstx->ktyx", *lines)
    rain = 3 * (rain - 0.1).relu() * (torch.rand(count, 1, 1, 1) >= dry)
    return rain[:, :PAST], rain[:, PAST]


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    data, held_out = tiles(int(torch.randint(800, 1200, ())), dry=0.1), tiles(128, dry=0.1)
    return Program(
        model=UNet(int(torch.randint(8, 12, ()))),
        rows=TensorDataset(*data),
        loss=partial(loss, floor=1e-3 if mended else 0.0),
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=list(held_out),
        guilty=Guilty("operation", ops=("log",)),
        batch_size=16,
        steps=240,
    )
