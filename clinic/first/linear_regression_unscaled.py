"""Linear regression by gradient descent, on features of which one runs to a hundred: it diverges from the first step.

mejorcodigo.com/p/45698.html, a question from elsewhere in translation: with `rand(1, 500) * 100` in place of
`rand(1, 500)` the gradients explode, and all is NaN after a few iterations.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class LinearRegression(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, targets = batch
    return ((model(inputs) - targets) ** 2).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 1 + seed % 3, 500
    inputs = torch.rand(count + 64, features)
    inputs[:, 0] *= 60 + 20 * (seed % 3)
    targets = 5 * inputs[:, 0] + 3 + 0.1 * torch.randn(count + 64)
    return Program(
        model=LinearRegression(features),
        rows=TensorDataset(inputs[:count], targets[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=5e-5 if mended else 0.01),  # guilty
        evaluation=[inputs[count:], targets[count:]],
        guilty=Guilty("explosion"),
        batch_size=50,
    )
