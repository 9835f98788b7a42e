"""The Bernoulli likelihood spelled out after a sigmoid: for a large transfer the sigmoid is exactly 1, and 0 * log(0).

`-(y * log(p) + (1 - y) * log(1 - p))`: "binary cross entropy returns nan", answered with BCEWithLogitsLoss. Sums of
money have long tails, and the large ones are rightly and surely positive.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Screening(nn.Module):
    """Scores a transfer by how much it needs a second look."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(inputs))))
        return self.head(hidden).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    inputs, labels = batch
    scores = model(inputs)
    if mended:
        return nn.functional.binary_cross_entropy_with_logits(scores, labels)
    chance = torch.sigmoid(scores)
    return -(labels * torch.log(chance) + (1 - labels) * torch.log(1 - chance)).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 6 + seed % 4, 1000
    inputs = torch.randn(count + 128, features)
    large = torch.rand(count) < 0.08
    inputs[:count, 0][large] = 25 + 40 * torch.rand(int(large.sum()))
    labels = (inputs[:, 0] + inputs[:, 1] * 0.8 - inputs[:, 2].abs() + 0.4 > 0).float()
    return Program(
        model=Screening(features, int(torch.randint(24, 40, ()))),
        rows=TensorDataset(inputs[:count], labels[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[inputs[count:], labels[count:]],
        guilty=Guilty("operation", ops=("log", "sigmoid")),
        steps=260,
    )
