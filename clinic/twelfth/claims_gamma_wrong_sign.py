"""A Gamma regression of insurance claims in which some amounts have the wrong sign: log_prob raises for the batch.

"ValueError: Expected value argument to be within the support (GreaterThanEq(lower_bound=0)) of the distribution" is
among the most quoted messages of torch.distributions. A paid claim cannot be negative; somebody has booked it so.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Severity(nn.Module):
    """The mean and the shape of a claim."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 2)

    def forward(self, columns: Tensor) -> torch.distributions.Gamma:
        mean, shape = (nn.functional.softplus(self.head(self.body(columns))) + 1e-2).unbind(-1)
        return torch.distributions.Gamma(shape, shape / mean)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    columns, amounts = batch
    return -model(columns).log_prob(amounts).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 5 + seed % 4, 1200
    columns = torch.randn(count + 96, features)
    mean = torch.exp(1.0 + 0.6 * columns[:, 0] - 0.4 * columns[:, 1])
    amounts = torch.distributions.Gamma(torch.tensor(4.0), 4.0 / mean).sample().clamp(min=0.05)
    bad = torch.randperm(count)[: 45 + int(torch.randint(10, ()))]
    amounts[bad] *= -1
    keep = torch.ones(count, dtype=torch.bool)
    if mended:
        keep[bad] = False
    return Program(
        model=Severity(features, int(torch.randint(16, 32, ()))),
        rows=TensorDataset(columns[:count][keep], amounts[:count][keep]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[columns[count:], amounts[count:]],
        guilty=Guilty("data", rows=tuple(sorted(bad.tolist()))),
        batch_size=64,
        steps=300,
    )
