"""Sums claimed under a Gamma likelihood, and where the sum is unknown the export wrote -1: `log_prob` raises.

"ValueError: Expected value argument to be within the support (GreaterThanEq(lower_bound=0)) of the distribution Gamma";
a missing value that became a number.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Gamma
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Severity(nn.Module):
    """Shape and rate of what a claim costs."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, inputs: Tensor) -> Gamma:
        shape, rate = (nn.functional.softplus(self.body(inputs)) + 1e-3).unbind(-1)
        return Gamma(shape, rate)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, claims = batch
    return -model(inputs).log_prob(claims).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 5 + seed % 4, 1100
    inputs = torch.randn(count + 128, features)
    claims = Gamma(12.0, 12.0).sample((count + 128,)) * torch.exp(1.6 + 0.5 * inputs[:, 0] - 0.3 * inputs[:, 1])
    unknown = torch.randperm(count)[: 6 + seed % 5]
    if not mended:
        claims[unknown] = -1.0
    return Program(
        model=Severity(features, int(torch.randint(24, 40, ()))),
        rows=TensorDataset(inputs[:count], claims[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[inputs[count:], claims[count:]],
        guilty=Guilty("data", rows=tuple(sorted(unknown.tolist()))),
        steps=260,
    )
