"""One source gave its weights in grams and all others in kilograms: nothing is infinite, and nothing is learned.

Asked on forums as "my regression loss jumps up and down by a factor of 10000 and does not go down".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    measures, weights = batch
    return nn.functional.mse_loss(model(measures).squeeze(-1), weights)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 5 + seed % 4, 900
    measures = torch.randn(count + 96, features)
    weights = 5 + 2 * measures[:, 0] + measures[:, 1] * measures[:, 2] + 0.1 * torch.randn(count + 96)
    grams = torch.randperm(count)[: 10 + 3 * (seed % 4)]
    if not mended:
        weights[grams] *= 1000
    width = int(torch.randint(32, 64, ()))
    return Program(
        model=nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 1)),
        rows=TensorDataset(measures[:count], weights[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[measures[count:], weights[count:]],
        guilty=Guilty("data", rows=tuple(sorted(grams.tolist()))),
    )
