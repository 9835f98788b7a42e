"""Ageing of battery cells by an Arrhenius factor; one laboratory wrote its cold chamber's temperatures in Celsius.

`exp(E / R * (1 / 298 - 1 / T))` is a number near one in kelvin, and infinite at T = -10. Two units in one table are
what anybody who merges public ageing data sets finds sooner or later.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

GAS, ROOM = 8.314e-3, 298.15  # kJ / mol / K, K


class Ageing(nn.Module):
    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, cells: Tensor, temperature: Tensor) -> Tensor:
        loss_at_room, barrier = self.body(cells).unbind(dim=-1)
        energy = 30 + 10 * barrier.tanh()
        return nn.functional.softplus(loss_at_room) * torch.exp(energy / GAS * (1 / ROOM - 1 / temperature))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    cells, temperature, faded = batch
    return nn.functional.mse_loss(model(cells, temperature), faded)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 5 + seed % 4, 1200
    cells = torch.randn(count + 128, features)
    temperature = 273.15 + 50 * torch.rand(count + 128)
    cold = torch.randperm(count)[: 6 + 2 * (seed % 4)].sort().values
    temperature[cold] = 273.15 - 25 + 20 * torch.rand(len(cold))
    energy = 30 + 8 * torch.sin(cells[:, 0])
    faded = nn.functional.softplus(cells[:, 1] + cells[:, 2]) * torch.exp(energy / GAS * (1 / ROOM - 1 / temperature))
    faded = faded + 0.02 * torch.randn(count + 128)
    if not mended:
        temperature[cold] -= 273.15
    tensors = [cells, temperature, faded]
    return Program(
        model=Ageing(features, int(torch.randint(24, 41, ()))),
        rows=TensorDataset(*(tensor[:count] for tensor in tensors)),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[tensor[count:] for tensor in tensors],
        guilty=Guilty("data", rows=tuple(cold.tolist())),
        steps=400,
    )
