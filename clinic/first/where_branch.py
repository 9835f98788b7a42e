"""`torch.where` picks the good branch, and the slope of the other one is NaN all the same: 0 times infinity.

Asked again and again as "NaN gradient through torch.where"; pytorch/pytorch#68425 among others.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Rooted(nn.Module):
    """Takes the root of what is positive, and zero of the rest."""

    def __init__(self, features: int, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.body = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(inputs)
        if self.mended:
            safe = torch.where(hidden > 0, hidden, torch.ones_like(hidden))
            rooted = torch.where(hidden > 0, safe.sqrt(), torch.zeros_like(hidden))
        else:
            rooted = torch.where(hidden > 0, hidden.sqrt(), torch.zeros_like(hidden))  # guilty
        return self.head(rooted).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, labels = batch
    return nn.functional.mse_loss(model(inputs), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, width = 6 + seed % 5, int(torch.randint(24, 40, ()))
    inputs = torch.randn(1024 + 64, features)
    labels = inputs[:, 0] * 2 + inputs[:, 1].abs()
    return Program(
        model=Rooted(features, width, mended),
        rows=TensorDataset(inputs[:1024], labels[:1024]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=5e-3),
        evaluation=[inputs[1024:], labels[1024:]],
        guilty=Guilty("operation", ops=("sqrt",)),
    )
