"""The brightness of stars by a small residual network that adds up its last feature map in half precision.

A sum over the map is what photometry does, and the map is kept in half to save memory. The flux of a bright star passes
65504 and is infinite; faint ones are fine, so that only some batches are lost. The sum of a map in half is a common
trap, even where each of its values is small.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

SIZE = 20


class Residual(nn.Module):
    """Two convolutions beside a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        nn.init.zeros_(self.outer.weight)

    def forward(self, image: Tensor) -> Tensor:
        return image + self.outer(self.inner(image).relu())


class Photometer(nn.Module):
    """A stem, two residual blocks, the sum of each map, and a line on its logarithm."""

    def __init__(self, width: int, half: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(Residual(width), Residual(width))
        self.head, self.half_sum = nn.Linear(width, 2), half

    def forward(self, image: Tensor) -> Tensor:
        maps = self.blocks(self.stem(image)).relu()
        if self.half_sum:
            maps = maps.half()
        flux = maps.sum((2, 3))  # guilty
        return self.head(flux.float().log1p() - 6)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    image, wanted = batch
    return F.smooth_l1_loss(model(image), wanted)


def stars(count: int, brightest: float) -> tuple[Tensor, Tensor]:
    """Each on a noisy sky, with the magnitude and the width of its disc."""
    magnitude = (7 + 2.2 * torch.randn(count)).clamp(max=brightest)
    wide = 1.5 + 2 * torch.rand(count)
    grid = torch.arange(SIZE) - SIZE / 2 + 0.5
    line = (-grid.square() / (2 * wide.square()[:, None])).exp()
    disc = line[:, None, :, None] * line[:, None, None, :] / (2 * torch.pi * wide.square())[:, None, None, None]
    image = magnitude.exp()[:, None, None, None] * disc
    image = image + (1 + image).sqrt() * torch.randn(image.shape)
    return image, torch.stack([(magnitude - 7) / 2.2, wide - 2.5], dim=-1)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    data, held_out = stars(int(torch.randint(900, 1300, ())), 12.5), stars(200, 12.5)
    return Program(
        model=Photometer(int(torch.randint(8, 14, ())), half=not mended),
        rows=TensorDataset(*data),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=list(held_out),
        guilty=Guilty("overflow", ops=("sum",)),
        steps=300,
    )
