"""Whistles of dolphins by a small SqueezeNet with the rate of its paper, 0.04, which was one for gradient descent.

With Adam in its place, and no batch norm in the network, the rectifiers die in the first updates and the loss stays
where guessing has it: no "nan", no message. "SqueezeNet does not learn, loss stuck" is answered with a rate of 1e-3 or
less.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

RATE_OF_THE_PAPER = 0.04


class Fire(nn.Module):
    def __init__(self, come: int, squeezed: int, leave: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(come, squeezed, 1)
        self.small, self.large = nn.Conv2d(squeezed, leave // 2, 1), nn.Conv2d(squeezed, leave // 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        squeezed = torch.relu(self.squeeze(x))
        return torch.relu(torch.cat([self.small(squeezed), self.large(squeezed)], dim=1))


class SqueezeNet(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.ReLU(),
            Fire(width, 8, 2 * width),
            nn.MaxPool2d(2),
            Fire(2 * width, 8, 2 * width),
            Fire(2 * width, 12, 3 * width),
        )
        self.classifier = nn.Conv2d(3 * width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x)).mean((-2, -1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    spectrogram, kind = batch
    return nn.functional.cross_entropy(model(spectrogram), kind)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, classes = int(torch.randint(700, 1000, ())), 160, int(torch.randint(4, 6, ()))
    every, bins, frames = rows + held_out, 18, 18
    kind = torch.randint(classes, (every,))
    slope = torch.linspace(-1.2, 1.2, classes)[kind].view(-1, 1, 1)
    pitch = torch.arange(bins).view(1, -1, 1) - bins / 2 - 3 * torch.randn(every, 1, 1)
    line = pitch - slope * (torch.arange(frames).view(1, 1, -1) - frames / 2)
    spectrogram = torch.exp(-((line / 1.2) ** 2)) + 0.3 * torch.randn(every, bins, frames)
    spectrogram = (2 * spectrogram).unsqueeze(1)
    return Program(
        model=SqueezeNet(2 * int(torch.randint(6, 9, ())), classes),
        rows=TensorDataset(spectrogram[:rows], kind[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3 if mended else RATE_OF_THE_PAPER),
        evaluation=[spectrogram[rows:], kind[rows:]],
        guilty=Guilty("explosion"),
        batch_size=16,
        steps=220,
    )
