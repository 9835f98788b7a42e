"""Dice loss without smoothing, over confident pixels: once the net knows that a blank image has no mask, it is 0 / 0.

Project-MONAI/MONAI#120 ("label is all zero and prediction is also all zero"), neuronets/nobrainer#8. It comes late.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Segmenter(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 1, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        chance = self.layers(images).squeeze(1).sigmoid()
        return chance * (chance > 0.2)


def dice(predicted: Tensor, masks: Tensor, smooth: float) -> Tensor:
    overlap = (predicted * masks).sum(dim=(-2, -1))
    total = predicted.sum(dim=(-2, -1)) + masks.sum(dim=(-2, -1))
    return (2 * overlap + smooth) / (total + smooth)  # guilty


def loss(model: nn.Module, batch: list[Tensor], smooth: float) -> Tensor:
    images, masks = batch
    return (1 - dice(model(images), masks, smooth)).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, side = 600, 10
    down, across = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    corner = torch.randint(side - 4, (count + 64, 2, 1, 1))
    extent = torch.randint(3, 6, (count + 64, 2, 1, 1))
    masks = (down >= corner[:, 0]) & (down < corner[:, 0] + extent[:, 0])
    masks = (masks & (across >= corner[:, 1]) & (across < corner[:, 1] + extent[:, 1])).float()
    masks[torch.randperm(count)[: 30 + 10 * (seed % 3)]] = 0.0  # nothing to be seen
    images = (masks + 0.3 * torch.randn(count + 64, side, side)).unsqueeze(1)
    return Program(
        model=Segmenter(int(torch.randint(6, 10, ()))),
        rows=TensorDataset(images[:count], masks[:count]),
        loss=partial(loss, smooth=1.0 if mended else 0.0),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[images[count:], masks[count:]],
        guilty=Guilty("operation", ops=("div", "true_divide")),
        steps=200,
    )
