"""A DeepONet that integrates functions from samples of them, its tanh networks trained by Adam at a tenth and more.

No NaN and no explosion: within a few steps the units of branch and trunk are saturated, and the loss wanders near that
of the mean. As in questions like "DeepONet antiderivative example does not converge" after somebody raised the rate.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class DeepONet(nn.Module):
    def __init__(self, sensors: int, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Linear(sensors, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)
        )
        self.trunk = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, samples: Tensor, places: Tensor) -> Tensor:
        return torch.einsum("bk,bpk->bp", self.branch(samples), self.trunk(places.unsqueeze(-1))) + self.bias


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    samples, places, integrals = batch
    return nn.functional.mse_loss(model(samples, places), integrals)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    sensors, points, waves, count = 20 + 2 * (seed % 4), 6, 4, 1200
    weights = torch.randn(count + 128, 1, waves)
    order = torch.arange(1, waves + 1)
    samples = (weights * torch.cos(order * torch.linspace(0, 3, sensors).unsqueeze(-1))).sum(dim=-1)
    places = 3 * torch.rand(count + 128, points)
    integrals = (weights * torch.sin(order * places.unsqueeze(-1)) / order).sum(dim=-1)
    tensors = [samples, places, integrals]
    return Program(
        model=DeepONet(sensors, int(torch.randint(32, 49, ()))),
        rows=TensorDataset(*(tensor[:count] for tensor in tensors)),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3 if mended else 0.1 + 0.02 * (seed % 3)),
        evaluation=[tensor[count:] for tensor in tensors],
        guilty=Guilty("optimizer"),
        steps=500,
    )
