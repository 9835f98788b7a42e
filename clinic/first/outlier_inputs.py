"""A few rows with the decimal point lost, a million times too large: one of them, and SGD throws the weights away.

google-deepmind/deepmind-research#346, "perhaps the feature has a very bad scale".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Regressor(nn.Module):
    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, targets = batch
    return ((model(inputs) - targets) ** 2).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 5 + seed % 6, 1500
    inputs = torch.randn(count + 96, features)
    targets = inputs[:, 0] + inputs[:, 1].relu() - 0.5 * inputs[:, 2]
    slipped = torch.randperm(count)[: 4 + seed % 4]
    places = torch.randint(5, 8, (len(slipped), 1))
    if not mended:
        inputs[slipped] *= 10.0**places
    return Program(
        model=Regressor(features, int(torch.randint(24, 48, ()))),
        rows=TensorDataset(inputs[:count], targets[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.03, momentum=0.9),
        evaluation=[inputs[count:], targets[count:]],
        guilty=Guilty("data", rows=tuple(sorted(slipped.tolist()))),
    )
