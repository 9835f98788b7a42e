"""A residual network whose batch norms were taken out for export, and the rate of 0.1 that is usual with them.

Each block adds as much variance as comes in, so that two dozen convolutions make features a hundred times as large.
The classifier begins at zero, the first loss is right, and the second one is not a number worth reading.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class BasicBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.conv2(F.relu(self.conv1(x))))


class ResNet(nn.Module):
    def __init__(self, channels: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*[BasicBlock(channels) for _ in range(depth)])
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(pictures)).mean((2, 3)))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    pictures, label = batch
    return F.cross_entropy(model(pictures), label)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    classes, size, depth = int(torch.randint(3, 6, ())), 12, int(torch.randint(8, 12, ()))
    rows, held_out = int(torch.randint(600, 1000, ())), 128
    textures = 0.5 * torch.randn(classes, 3, size, size) + torch.randn(classes, 3, 1, 1)
    label = torch.randint(classes, (rows + held_out,))
    pictures = textures[label] + 0.8 * torch.randn(rows + held_out, 3, size, size)
    return Program(
        model=ResNet(int(torch.randint(8, 13, ())), depth, classes),
        rows=TensorDataset(pictures[:rows], label[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=1e-4 if mended else 0.1, momentum=0.9),
        evaluation=[pictures[rows:], label[rows:]],
        guilty=Guilty("explosion"),
        steps=200,
    )
