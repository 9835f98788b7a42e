"""A deep VGG without normalization under Adam, at a rate ten times too high: the loss stands at ln(classes) for ever.

Nothing is infinite and nothing jumps: the first steps switch off whole layers of ReLUs, and what is left is the bias.
Asked on forums as "VGG16 from scratch: loss stuck at 2.30, accuracy 10 %"; the answer is always a lower rate.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


def vgg(channels: int, classes: int) -> nn.Sequential:
    """Pairs of convolutions and a pool between them, as in torchvision's vgg, only smaller."""
    layers: list[nn.Module] = []
    before = 1
    for width in (channels, channels, "pool", 2 * channels, 2 * channels, "pool", 2 * channels, 2 * channels):
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        before = width
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    layers += [nn.Linear(4 * before, 16), nn.Tanh(), nn.Linear(16, classes)]
    return nn.Sequential(*layers)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def stripes(labels: Tensor, classes: int, size: int) -> Tensor:
    """Gratings whose direction is the class."""
    angle = (labels * torch.pi / classes).reshape(-1, 1, 1, 1)
    across = torch.arange(size).reshape(1, 1, 1, size)
    down = torch.arange(size).reshape(1, 1, size, 1)
    phase = 6.3 * torch.rand(len(labels), 1, 1, 1)
    waves = torch.sin(1.2 * (across * angle.cos() + down * angle.sin()) + phase)
    return waves + 0.4 * torch.randn(waves.shape)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    classes, count = 4 + seed % 3, 800
    labels = torch.randint(classes, (count + 96,))
    images = stripes(labels, classes, 12)
    return Program(
        model=vgg(int(torch.randint(8, 12, ())), classes),
        rows=TensorDataset(images[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3 if mended else 5e-2),  # guilty
        evaluation=[images[count:], labels[count:]],
        guilty=Guilty("explosion"),
        steps=260,
    )
