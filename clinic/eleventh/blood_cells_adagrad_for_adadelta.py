"""Adadelta's rate of one is left in place when Adagrad takes its turn: the first update moves every weight by one.

The example of handwritten digits trains by Adadelta at a rate of 1.0. Adagrad divides by the root of what it has summed
up, which at the first step is the gradient itself. The loss leaps to a million at once, and ends where guessing is.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class CellNet(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 48),
            nn.ReLU(),
            nn.Linear(48, classes),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        return self.layers(pixels)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    pixels, label = batch
    return nn.functional.cross_entropy(model(pixels), label)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, size, classes = int(torch.randint(700, 1000, ())), 192, 16, int(torch.randint(5, 8, ()))
    every = rows + held_out
    label = torch.randint(classes, (every,))
    colours, lobes = torch.randn(classes, 3), 1 + torch.arange(classes) % 4
    grid = torch.linspace(-1, 1, size)
    shift = 0.2 * torch.randn(2, every, 1, 1)
    down, across = grid.view(1, -1, 1) - shift[0], grid.view(1, 1, -1) - shift[1]
    angle, away = torch.atan2(down, across), (down**2 + across**2).sqrt()
    edge = 0.6 + 0.2 * torch.cos(lobes[label].view(-1, 1, 1) * angle + 6.28 * torch.rand(every, 1, 1))
    nucleus = torch.sigmoid(12 * (edge - away)).unsqueeze(1)
    stain = (0.5 * colours[label] + 0.3 * torch.randn(every, 3)).view(-1, 3, 1, 1)
    pixels = nucleus * (1 + stain) + 0.3 * torch.randn(every, 3, size, size)
    return Program(
        model=CellNet(int(torch.randint(8, 13, ())), classes),
        rows=TensorDataset(pixels[:rows], label[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adagrad, lr=2e-2 if mended else 1.0),
        evaluation=[pixels[rows:], label[rows:]],
        guilty=Guilty("explosion"),
        batch_size=32,
        steps=240,
    )
