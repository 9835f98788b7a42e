"""Hours to failure of bearings under a Weibull law; a few broke while they were mounted and have zero hours.

`torch.distributions` raises "Expected value argument ... to be within the support (GreaterThan(lower_bound=0.0))", as
asked by users of survival models whose tables have events at time zero.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Weibull
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Lifetime(nn.Module):
    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 2)

    def forward(self, loads: Tensor) -> Weibull:
        scale, shape = nn.functional.softplus(self.head(self.body(loads))).add(0.05).unbind(dim=-1)
        return Weibull(scale, shape)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    loads, hours = batch
    return -model(loads).log_prob(hours).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 5 + seed % 4, 1000
    loads = torch.randn(count + 128, features)
    scale = torch.exp(0.9 * loads[:, 0] - 0.6 * loads[:, 1] + 1.0)
    hours = Weibull(scale, 4 + torch.sigmoid(loads[:, 2])).sample()
    broken = torch.randperm(count)[: 2 + seed % 3].sort().values
    if not mended:
        hours[broken] = 0.0
    return Program(
        model=Lifetime(features, int(torch.randint(16, 33, ()))),
        rows=TensorDataset(loads[:count], hours[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[loads[count:], hours[count:]],
        guilty=Guilty("data", rows=tuple(broken.tolist())),
        steps=400,
    )
