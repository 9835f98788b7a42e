"""The sweep that looks for a learning rate was left on for the real run: each step the rate grows by some percent.

Asked on forums as "training is perfect for the first two epochs and then explodes, no matter the seed".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Sweep(torch.optim.SGD):
    """SGD whose learning rate grows by a factor with every step."""

    def __init__(self, weights: Any, lr: float, growth: float, momentum: float) -> None:
        super().__init__(weights, lr=lr, momentum=momentum)
        self.growth = growth

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        done = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= self.growth  # guilty
        return done


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 5 + seed % 5, 1000
    inputs = torch.randn(count + 96, features)
    targets = torch.stack([inputs[:, 0] * inputs[:, 1], inputs[:, 2].sin()], dim=-1)
    width = int(torch.randint(32, 64, ()))
    return Program(
        model=nn.Sequential(
            nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        ),
        rows=TensorDataset(inputs[:count], targets[:count]),
        loss=loss,
        optimizer=partial(Sweep, lr=0.02, growth=1.0 if mended else 1.03 + 0.005 * (seed % 3), momentum=0.9),
        evaluation=[inputs[count:], targets[count:]],
        guilty=Guilty("explosion"),
    )
