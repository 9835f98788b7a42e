"""Focal loss with gamma below one: once a row is certain, p is exactly 1 and the slope of (1 - p) ** gamma infinite.

Infinity times log(1) = 0 is NaN. Reported for many a focal loss on GitHub ("focal loss returns nan when gamma < 1",
kornia, segmentation_models.pytorch): with gamma = 2, as in the paper, it never showed.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

GAMMA = 0.5


class Separable(nn.Module):
    """A depthwise and a pointwise convolution, as MobileNet has them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(before, before, 3, stride=stride, padding=1, groups=before)
        self.pointwise = nn.Conv2d(before, after, 1)

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.relu(self.pointwise(self.depthwise(images)))


class TinyMobileNet(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.Sequential(Separable(channels, 2 * channels, 2), Separable(2 * channels, 2 * channels, 2))
        self.head = nn.Linear(2 * channels * 4, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.blocks(nn.functional.relu(self.stem(images)))
        return self.head(nn.functional.adaptive_avg_pool2d(hidden, 2).flatten(1))


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    images, labels = batch
    certain = model(images).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    doubt = 1 - certain.exp()
    if mended:
        doubt = doubt.clamp(min=1e-6)
    focus = doubt**GAMMA  # guilty
    return -(focus * certain).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    classes, size, count = 3 + seed % 2, 12, 700
    labels = torch.randint(classes, (count + 96,))
    masks = (torch.rand(classes, 1, size, size) < 0.35).float()
    exposure = torch.exp(0.7 * torch.randn(count + 96, 1, 1, 1))
    images = exposure * (masks[labels] + 0.6 * torch.randn(count + 96, 1, size, size))
    return Program(
        model=TinyMobileNet(int(torch.randint(8, 14, ())), classes),
        rows=TensorDataset(images[:count], labels[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[images[count:], labels[count:]],
        guilty=Guilty("operation", ops=("pow",)),
        steps=260,
    )
