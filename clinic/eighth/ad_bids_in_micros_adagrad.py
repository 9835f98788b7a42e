"""A few bids came in millionths, as the interface of an advertising platform returns them, and Adagrad never forgets.

The one huge gradient of such a row stays in the sum of squares by which every later step is divided: nothing is NaN,
but the loss hardly falls from there on. Asked as "Adagrad stops learning after a random number of steps".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    features, revenues = batch
    return nn.functional.mse_loss(model(features).squeeze(-1), revenues)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    columns, count = 8 + seed % 5, 1200
    features = torch.randn(count + 256, columns)
    bids = torch.exp(0.5 * torch.randn(count + 256))
    features[:, 0] = bids
    revenues = torch.tanh(features[:, 1:] @ torch.randn(columns - 1) / columns**0.5) + bids.log() + 0.5
    revenues = revenues + 0.1 * torch.randn(count + 256)
    micros = torch.randperm(count)[: 3 + seed % 3].sort().values
    if not mended:
        features[micros, 0] *= 1e6
    width = int(torch.randint(24, 48, ()))
    return Program(
        model=nn.Sequential(
            nn.Linear(columns, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        ),
        rows=TensorDataset(features[:count], revenues[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adagrad, lr=0.03),
        evaluation=[features[count:], revenues[count:]],
        guilty=Guilty("data", rows=tuple(micros.tolist())),
        steps=400,
    )
