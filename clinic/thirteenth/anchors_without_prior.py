"""A RetinaNet's head without the prior of its paper: at first every anchor says one half, and nearly all of them lie.

The bias of the last layer should be -log((1 - 0.01) / 0.01), "otherwise the large number of background examples
destabilises training in the first iteration". The loss is summed over thousands of anchors and divided by the few that
hold something, so the first steps of SGD are enormous. Reimplementations miss it: "focal loss diverges / nan at start".
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

SIDE = 20


class Detector(nn.Module):
    """A tower of convolutions, and a logit for each kind at each place."""

    def __init__(self, channels: int, kinds: int, prior: float | None) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 1
        for _ in range(4):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
            before = channels
        self.tower, self.logits = nn.Sequential(*layers), nn.Conv2d(channels, kinds, 3, padding=1)
        for layer in layers[::2]:
            nn.init.kaiming_normal_(layer.weight)
        if prior is not None:
            nn.init.constant_(self.logits.bias, -math.log((1 - prior) / prior))

    def forward(self, images: Tensor) -> Tensor:
        return self.logits(self.tower(images))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, truth = batch
    logits = model(images)
    chance = logits.sigmoid()
    right = chance * truth + (1 - chance) * (1 - truth)
    weight = (0.25 * truth + 0.75 * (1 - truth)) * (1 - right) ** 2
    entropy = nn.functional.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    return (weight * entropy).sum() / truth.sum().clamp(min=1)


def shelves(count: int, kinds: int) -> tuple[Tensor, Tensor]:
    """Pictures with one or two small marks: each kind has a pattern of 3 x 3 of its own."""
    patterns = torch.randn(kinds, 3, 3).sign() * 1.5
    images, truth = 0.3 * torch.randn(count, 1, SIDE, SIDE), torch.zeros(count, kinds, SIDE, SIDE)
    for row in range(count):
        for _ in range(1 + row % 2):
            x, y, kind = *torch.randint(1, SIDE - 1, (2,)).tolist(), int(torch.randint(kinds, ()))
            images[row, 0, x - 1 : x + 2, y - 1 : y + 2] = patterns[kind] + 0.2 * torch.randn(3, 3)
            truth[row, kind, x, y] = 1.0
    return images, truth


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, kinds = 400, 2 + seed % 3
    images, truth = shelves(count + 64, kinds)
    return Program(
        model=Detector(int(torch.randint(10, 15, ())), kinds, 0.01 if mended else None),  # guilty
        rows=TensorDataset(images[:count], truth[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.012, momentum=0.9),
        evaluation=[images[count:], truth[count:]],
        guilty=Guilty("explosion"),
        batch_size=16,
        steps=600,
    )
