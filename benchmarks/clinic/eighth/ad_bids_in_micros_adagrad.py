"""A few bids came in millionths, as the interface of an advertising platform returns them, and Adagrad never forgets.

The one huge gradient of such a row stays in the sum of squares by which every later step is divided: nothing is NaN,
but the loss hardly falls from there on. Asked as "Adagrad stops learning after a random number of steps".
"""

from __future__ import annotations

from functools import partial

import torch
from program import Guilty, Program
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    features, clicks = batch
    return nn.functional.binary_cross_entropy_with_logits(model(features).squeeze(-1), clicks)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    columns, count = 8 + seed % 5, 1600
    features = torch.randn(count + 256, columns)
    bids = torch.exp(0.5 * torch.randn(count + 256))
    features[:, 0] = bids
    leaning = features[:, 1:] @ torch.randn(columns - 1) * 2 / columns**0.5 + 2 * (bids - 1)
    clicks = (leaning + 1.5 * features[:, 1] * features[:, 2] > 0).float()
    micros = torch.randperm(count)[: 3 + seed % 3].sort().values
    if not mended:
        features[micros, 0] *= 1e6
    width = int(torch.randint(24, 48, ()))
    return Program(
        model=nn.Sequential(
            nn.Linear(columns, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        ),
        rows=TensorDataset(features[:count], clicks[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adagrad, lr=0.03),
        evaluation=[features[count:], clicks[count:]],
        guilty=Guilty("data", rows=tuple(micros.tolist())),
        steps=400,
    )
