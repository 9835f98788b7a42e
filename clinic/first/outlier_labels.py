"""A few labels are the placeholder for "unknown", 99999999, and the squared error takes them at their word.

rstudio-conf-2020/dl-keras-tf#9, "When the error gets squared, the sum explodes"; here a handful of rows does it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Prices(nn.Module):
    def __init__(self, features: int, districts: int, width: int) -> None:
        super().__init__()
        self.district = nn.Embedding(districts, 4)
        self.layers = nn.Sequential(nn.Linear(features + 4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, features: Tensor, district: Tensor) -> Tensor:
        return self.layers(torch.cat([features, self.district(district)], dim=-1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    features, district, price = batch
    return nn.functional.mse_loss(model(features, district), price)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, districts, count = 4 + seed % 5, 12, 1100
    inputs, district = torch.randn(count + 96, features), torch.randint(districts, (count + 96,))
    price = inputs[:, 0] + 0.5 * inputs[:, 1] ** 2 + torch.randn(districts)[district]
    unknown = torch.randperm(count)[: 2 + seed % 4]
    if not mended:
        price[unknown] = 99999999.0
    tensors = [inputs, district, price]
    return Program(
        model=Prices(features, districts, int(torch.randint(32, 64, ()))),
        rows=TensorDataset(*(tensor[:count] for tensor in tensors)),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.03, momentum=0.9),
        evaluation=[tensor[count:] for tensor in tensors],
        guilty=Guilty("data", rows=tuple(sorted(unknown.tolist()))),
        steps=280,
    )
