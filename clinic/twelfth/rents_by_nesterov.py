"""A regression of rents with SGD and Nesterov momentum at a rate of 0.1: the loss is 1e10 within ten steps, then NaN.

The classic "loss is nan after a few iterations, linear regression in PyTorch": targets that nobody has scaled and the
rate of an image-classification recipe. A lower rate (or a clipped gradient) is all that it needs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Rent(nn.Module):
    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, width)
        self.more = nn.Linear(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = nn.functional.leaky_relu(self.hidden(inputs))
        return self.head(nn.functional.leaky_relu(self.more(hidden))).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, rents = batch
    return nn.functional.mse_loss(model(inputs), rents)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 6 + seed % 4, 1200
    inputs = torch.randn(count + 128, features)
    rents = 14 + 3 * inputs[:, 0] - 2 * inputs[:, 1] + inputs[:, 2].abs() + 0.5 * torch.randn(count + 128)
    return Program(
        model=Rent(features, int(torch.randint(24, 40, ()))),
        rows=TensorDataset(inputs[:count], rents[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=1e-3 if mended else 0.1, momentum=0.9, nesterov=True),  # guilty
        evaluation=[inputs[count:], rents[count:]],
        guilty=Guilty("explosion"),
        steps=300,
    )
