"""Herd sizes are at least one wherever a herd was seen, so the counts are modelled by a zero-truncated Poisson.

`log(1 - exp(-rate))` is minus infinity once the rate of some place is below a ten-millionth: with outlying covariates
it is, after a while of training. The answer everywhere is `expm1`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class HerdSize(nn.Module):
    """A log rate that is linear in the habitat's covariates, with a smooth correction by month."""

    def __init__(self, covariates: int, months: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.slopes = nn.Linear(covariates, 1)
        self.month = nn.Embedding(months, 1)
        nn.init.zeros_(self.slopes.weight)
        nn.init.zeros_(self.month.weight)

    def forward(self, habitat: Tensor, month: Tensor) -> Tensor:
        return (self.slopes(habitat) + self.month(month)).squeeze(-1)

    def log_seen(self, rate: Tensor) -> Tensor:
        """The logarithm of the probability that there is anything to be seen."""
        if self.mended:
            return torch.log(-torch.expm1(-rate))
        return torch.log(1 - torch.exp(-rate))  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    habitat, month, counts = batch
    log_rate = model(habitat, month)
    rate = log_rate.exp()
    return (rate - counts * log_rate + model.log_seen(rate) + torch.lgamma(counts + 1)).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    covariates, months, count = 4 + seed % 4, 12, 1200
    habitat = torch.randn(count + 200, covariates)
    slopes = torch.randn(covariates)
    slopes = 1.1 * slopes / slopes.norm()
    arid = torch.randperm(count)[: 8 + 2 * (seed % 5)]
    habitat[arid] = -(19 + 6 * torch.rand(len(arid), 1)) * slopes / 1.21 + 0.1 * torch.randn(len(arid), covariates)
    month = torch.randint(months, (count + 200,))
    rate = (habitat @ slopes + 0.5 * torch.sin(month / 2.0) + 0.5).exp()
    counts = torch.poisson(rate)
    for _ in range(100):
        counts = torch.where(counts < 1, torch.poisson(rate), counts)
    counts = counts.clamp(min=1)
    return Program(
        model=HerdSize(covariates, months, mended),
        rows=TensorDataset(habitat[:count], month[:count], counts[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[habitat[count:], month[count:], counts[count:]],
        guilty=Guilty("operation", ops=("log",)),
        steps=400,
    )
