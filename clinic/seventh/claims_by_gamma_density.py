"""The sizes of insurance claims follow a gamma density, but on a few claims more was recovered than had been paid.

`torch.distributions` raises "Expected value argument to be within the support (GreaterThanEq(lower_bound=0.0))". Asked
in forum threads on Gamma and LogNormal heads that stop in the middle of the first epoch.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Gamma
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Severity(nn.Module):
    """Policy and vehicle to shape and rate of the claim."""

    def __init__(self, regions: int, numbers: int, width: int) -> None:
        super().__init__()
        self.regions = nn.Embedding(regions, 4)
        self.body = nn.Sequential(nn.Linear(numbers + 4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.head = nn.Linear(width, 2)

    def forward(self, region: Tensor, numbers: Tensor) -> Gamma:
        hidden = self.body(torch.cat([self.regions(region), numbers], dim=-1))
        shape, mean = nn.functional.softplus(self.head(hidden)).add(1e-3).unbind(dim=-1)
        return Gamma(shape, shape / mean)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    region, numbers, paid = batch
    return -model(region, numbers).log_prob(paid).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    regions, numbers, count = 8 + seed % 5, 5, 1600
    width = int(torch.randint(24, 48, ()))
    region = torch.randint(regions, (count + 128,))
    policy = torch.randn(count + 128, numbers)
    mean = (0.7 * torch.randn(regions)[region] + 0.5 * policy[:, 0] - 0.4 * policy[:, 1].abs()).exp()
    paid = Gamma(torch.tensor(4.0), 4.0 / mean).sample().clamp(min=1e-3)
    recovered = torch.randperm(count)[: 3 + seed % 4]
    if not mended:
        paid[recovered] *= -torch.rand(len(recovered)).clamp(min=0.01)
    return Program(
        model=Severity(regions, numbers, width),
        rows=TensorDataset(region[:count], policy[:count], paid[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[region[count:], policy[count:], paid[count:]],
        guilty=Guilty("data", rows=tuple(recovered.sort().values.tolist())),
        steps=360,
    )
