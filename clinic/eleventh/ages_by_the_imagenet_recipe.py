"""Ages from small pictures of faces, in years, by the rate with which networks are trained to tell a thousand classes.

Stochastic gradient descent at 0.1 with momentum 0.9 is the recipe for a cross-entropy. The squared error of an age of
forty years, without batch norm, has gradients a hundred times as large: the loss is "nan" after a handful of steps.
The answer in forums is to lower the rate, to clip or to scale the ages.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class AgeNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        return self.layers(pixels).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    pixels, age = batch
    return nn.functional.mse_loss(model(pixels), age)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, size = int(torch.randint(900, 1300, ())), 192, 16
    every = rows + held_out
    age = 5 + 75 * torch.rand(every)
    grid = torch.linspace(-1, 1, size)
    down, across = grid.view(1, -1, 1), grid.view(1, 1, -1)
    shift = 0.15 * torch.randn(every, 1, 1)
    face = (1.2 - (down - shift) ** 2 - 1.5 * across**2).clamp(min=0)
    wrinkles = (age / 60).view(-1, 1, 1) * torch.sin(14 * down + 6.28 * torch.rand(every, 1, 1)) * face
    hair = (1 - age / 80).view(-1, 1, 1) * (down < -0.6).float()
    pixels = (face + wrinkles - hair + 0.15 * torch.randn(every, size, size)).unsqueeze(1)
    return Program(
        model=AgeNet(int(torch.randint(8, 13, ()))),
        rows=TensorDataset(pixels[:rows], age[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=1e-4 if mended else 0.1, momentum=0.9, weight_decay=1e-4),
        evaluation=[pixels[rows:], age[rows:]],
        guilty=Guilty("explosion"),
        batch_size=64,
    )
