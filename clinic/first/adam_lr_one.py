"""Adam with the learning rate that used to be right for SGD: nothing is infinite, the loss only never comes down.

Asked on forums as "switched from SGD to Adam and the network does not learn any more, accuracy is at chance".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class ConvNet(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, channels, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(2),
        )
        self.head = nn.Linear(4 * channels, classes)

    def forward(self, signals: Tensor) -> Tensor:
        return self.head(self.features(signals.unsqueeze(1)).flatten(1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    signals, labels = batch
    return nn.functional.cross_entropy(model(signals), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    classes, length, count = 3 + seed % 3, 32, 700
    labels = torch.randint(classes, (count + 96,))
    pitch = 0.3 + 0.4 * labels.unsqueeze(-1)
    signals = torch.sin(pitch * torch.arange(length) + 6 * torch.rand(count + 96, 1))
    signals = signals + 0.5 * torch.randn(count + 96, length)
    return Program(
        model=ConvNet(int(torch.randint(6, 12, ())), classes),
        rows=TensorDataset(signals[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3 if mended else 1.0),  # guilty
        evaluation=[signals[count:], labels[count:]],
        guilty=Guilty("explosion"),
        steps=200,
    )
