"""MobileNet's blocks with the rate of the paper, 0.045 for RMSprop, which stands for another RMSprop than PyTorch's.

TensorFlow's has an epsilon of one inside the root, its rate is for sixteen workers; PyTorch's divides by the root alone
with 1e-8 after it. The loss creeps down and stays far above what a rate of a thousandth reaches. Found in many
"cannot reproduce MobileNetV2" issues; timm has its own `RMSpropTF` for this reason.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.skips = stride == 1 and inputs == outputs
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, hidden, 1),
            nn.GroupNorm(1, hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden),
            nn.GroupNorm(1, hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, outputs, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        return images + self.layers(images) if self.skips else self.layers(images)


class MobileNet(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1),
            InvertedResidual(width, width, 1, 2),
            InvertedResidual(width, 2 * width, 2, 3),
            InvertedResidual(2 * width, 2 * width, 1, 3),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    classes, side, count = 5 + seed % 3, 20, 900
    labels = torch.randint(classes, (count + 128,))
    angle = labels * torch.pi / classes + 0.15 * torch.randn(count + 128)
    reach = torch.arange(side)
    waves = angle.cos()[:, None, None] * reach + angle.sin()[:, None, None] * reach[:, None]
    stripes = torch.sin(1.1 * waves + 6.3 * torch.rand(count + 128, 1, 1)).unsqueeze(1)
    images = stripes * torch.rand(count + 128, 3, 1, 1) + 0.3 * torch.randn(count + 128, 3, side, side)
    return Program(
        model=MobileNet(int(torch.randint(8, 13, ())), classes),
        rows=TensorDataset(images[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.RMSprop, lr=1e-3 if mended else 0.045),
        evaluation=[images[count:], labels[count:]],
        guilty=Guilty("optimizer"),
        steps=320,
    )
