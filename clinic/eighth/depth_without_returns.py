"""Depth of a street from a picture, with a scale-invariant loss per image over the pixels that the lidar has seen.

In a few images the lidar saw nothing (fog, a frame dropped), and a sum over no pixels is divided by their number.
As in issues of AdaBins and BTS: "loss becomes nan when the crop holds no valid depth".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class DepthUNet(nn.Module):
    def __init__(self, channels: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.enter = nn.Conv2d(2, channels, 3, padding=1)
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.leave = nn.Conv2d(2 * channels, 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.enter(images).relu()
        coarse = self.up(self.down(fine).relu()).relu()
        return self.leave(torch.cat([fine, coarse], dim=1)).squeeze(1)

    def scale_invariant(self, images: Tensor, depths: Tensor) -> Tensor:
        seen = (depths > 0).float()
        errors = (self(images) - depths.clamp(min=1e-3).log()) * seen
        pixels = seen.sum(dim=(1, 2))
        if self.mended:
            pixels = pixels.clamp(min=1)
        moments = torch.stack([errors.square().sum(dim=(1, 2)), errors.sum(dim=(1, 2))]) / pixels  # guilty
        return (moments[0] - 0.85 * moments[1].square() + 1e-6).sqrt().mean()


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, depths = batch
    return model.scale_invariant(images, depths)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, count = 16, 480
    hills = torch.randn(count + 64, 2, 4, 4)
    images = nn.functional.interpolate(hills, size=(side, side), mode="bilinear")
    depths = torch.exp(1.5 + images[:, 0] + 0.5 * torch.tanh(2 * images[:, 1]))
    images = images + 0.05 * torch.randn_like(images)
    depths[torch.rand_like(depths) > 0.15] = 0
    blind = torch.randperm(count)[: 2 + seed % 4]
    depths[blind] = 0
    return Program(
        model=DepthUNet(int(torch.randint(8, 14, ())), mended),
        rows=TensorDataset(images[:count], depths[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[images[count:], depths[count:]],
        guilty=Guilty("operation", ops=("div", "true_divide", "divide")),
        batch_size=8,
        steps=300,
    )
