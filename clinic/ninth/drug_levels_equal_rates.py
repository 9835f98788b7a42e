"""The level of a drug after a tablet divides by the rate of uptake minus that of loss, and both begin at the same one.

Bateman's function, ka / (ka - ke) (exp(-ke t) - exp(-ka t)), is 0 / 0 where the two rates agree; the last layer is set
to zero so that training begins with the average patient, and then they agree for everyone: NaN from the first update.
Known to users of NONMEM and Stan as flip-flop or "ka = ke", and met again in every network that ends in the formula.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


def level(hours: Tensor, volume: Tensor, uptake: Tensor, clearance: Tensor, safe: bool) -> Tensor:
    """How much of a tablet is in the blood after some hours."""
    if safe:
        apart = uptake - clearance
        apart = torch.where(apart.abs() < 1e-3, 1e-3, apart)
        return uptake * (-clearance * hours).exp() * -torch.expm1(-apart * hours) / apart / volume
    left = (-clearance * hours).exp() - (-uptake * hours).exp()
    return uptake / volume * left / (uptake - clearance)  # guilty


class Patient(nn.Module):
    """Volume, uptake and clearance from age, weight, kidneys and genes."""

    def __init__(self, features: int, width: int, safe: bool) -> None:
        super().__init__()
        self.safe = safe
        self.body = nn.Sequential(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.head = nn.Linear(width, 3)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, covariates: Tensor, hours: Tensor) -> Tensor:
        volume, uptake, clearance = self.head(self.body(covariates)).exp().unsqueeze(-1).unbind(1)
        return level(hours, volume, uptake, clearance, self.safe)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    covariates, hours, measured = batch
    return nn.functional.mse_loss(model(covariates, hours), measured)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, samples, count = 4 + seed % 3, 6 + seed % 4, 900
    covariates = torch.randn(count + 128, features)
    hours = (0.2 + 8 * torch.rand(count + 128, samples)).sort(dim=1).values
    share = torch.randn(features, 3) / features**0.5
    volume, uptake, clearance = (0.7 * (covariates @ share).tanh()).exp().unsqueeze(-1).unbind(1)
    clearance = 0.25 * clearance
    measured = level(hours, 0.8 * volume, 1.2 * uptake, clearance, safe=True)
    measured = measured * (0.05 * torch.randn(count + 128, samples)).exp()
    return Program(
        model=Patient(features, int(torch.randint(24, 40, ())), safe=mended),
        rows=TensorDataset(covariates[:count], hours[:count], measured[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[covariates[count:], hours[count:], measured[count:]],
        guilty=Guilty("operation", ops=("div", "true_divide")),
        steps=400,
    )
