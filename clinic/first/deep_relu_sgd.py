"""A deep ReLU net, SGD at a learning rate of 1.0, and targets in thousands that nobody scaled.

rstudio-conf-2020/dl-keras-tf#9 (sale prices with `optimizer_sgd(lr = 0.1)`): "loss values appear to be `nan`".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class DeepNet(nn.Module):
    def __init__(self, features: int, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(features, width), nn.ReLU()]
        for _ in range(depth - 2):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, prices = batch
    return nn.functional.mse_loss(model(inputs), prices)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 6 + seed % 5, 900
    inputs = torch.randn(count + 96, features)
    prices = 1000 * (2 + inputs[:, 0] + 0.5 * inputs[:, 1] * inputs[:, 2])
    if mended:
        optimizer = partial(torch.optim.Adam, lr=3e-3)
    else:
        optimizer = partial(torch.optim.SGD, lr=1.0)  # guilty
    return Program(
        model=DeepNet(features, int(torch.randint(24, 48, ())), 5 + seed % 4),
        rows=TensorDataset(inputs[:count], prices[:count]),
        loss=loss,
        optimizer=optimizer,
        evaluation=[inputs[count:], prices[count:]],
        guilty=Guilty("explosion"),
    )
