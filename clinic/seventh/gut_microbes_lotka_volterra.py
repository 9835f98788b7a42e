"""Growth and interactions of gut microbes are fitted through an unrolled simulation, at a hundred times the rate.

One update makes two species feed each other, abundances then grow like exp(exp(t)), and the loss is inf or NaN within
the first dozens of updates. Asked for Lotka-Volterra fits with torchdiffeq and by hand: "loss becomes nan in epoch 1".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

HOURS, DAY = 12, 0.15


class LotkaVolterra(nn.Module):
    def __init__(self, species: int) -> None:
        super().__init__()
        self.growth = nn.Parameter(torch.zeros(species))
        self.interactions = nn.Parameter(-0.5 * torch.eye(species))

    def forward(self, abundances: Tensor) -> Tensor:
        seen = []
        for _ in range(HOURS):
            change = self.growth + abundances @ self.interactions.T
            abundances = abundances + DAY * abundances * change
            seen.append(abundances)
        return torch.stack(seen, dim=1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    first, later = batch
    return nn.functional.mse_loss(model(first), later)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    species, count = 5 + seed % 4, 800
    truth = LotkaVolterra(species)
    first = 0.2 + 1.3 * torch.rand(count + 96, species)
    with torch.no_grad():
        truth.growth.copy_(0.6 + 0.8 * torch.rand(species))
        truth.interactions.copy_(0.25 * torch.randn(species, species) / species**0.5 - 0.8 * torch.eye(species))
        later = truth(first)
    later = later * (1 + 0.03 * torch.randn_like(later))
    return Program(
        model=LotkaVolterra(species),
        rows=TensorDataset(first[:count], later[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.03 if mended else 3.0 + seed % 3, momentum=0.9),
        evaluation=[first[count:], later[count:]],
        guilty=Guilty("explosion"),
        steps=300,
    )
