"""A network of sines (SIREN) that stores a map of heights, trained with Adam at 1e-2.

The layers multiply by 30 inside of the sine. What is a gentle rate for an ordinary network moves every phase by several
radians in a step, and the map that comes out is noise: "SIREN does not converge", while the authors use 1e-4. The loss
stays finite and quiet.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Sine(nn.Module):
    def __init__(self, inputs: int, outputs: int, omega: float, first: bool = False) -> None:
        super().__init__()
        self.omega, self.linear = omega, nn.Linear(inputs, outputs)
        bound = 1 / inputs if first else math.sqrt(6 / inputs) / omega
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.omega * self.linear(x))


class Terrain(nn.Module):
    def __init__(self, width: int, depth: int, omega: float) -> None:
        super().__init__()
        hidden = [Sine(width, width, omega) for _ in range(depth)]
        self.net = nn.Sequential(Sine(2, width, omega, first=True), *hidden, nn.Linear(width, 1))
        bound = math.sqrt(6 / width) / omega
        nn.init.uniform_(self.net[-1].weight, -bound, bound)

    def forward(self, place: Tensor) -> Tensor:
        return self.net(place).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    place, height = batch
    return F.mse_loss(model(place), height)


def heights(places: Tensor, hills: int) -> Tensor:
    """Some hills and a ridge, of mean zero and variance one."""
    centres, widths = torch.rand(hills, 2) * 2 - 1, 0.15 + 0.3 * torch.rand(hills)
    ups = torch.randn(hills)
    squared = (places[:, None] - centres).square().sum(-1)
    height = (ups * torch.exp(-squared / (2 * widths**2))).sum(-1) + 0.3 * torch.sin(6 * places @ torch.randn(2))
    return (height - height.mean()) / height.std()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, hills = int(torch.randint(72, 97, ())), int(torch.randint(8, 15, ()))
    width, depth = int(torch.randint(64, 129, ())), int(torch.randint(2, 4, ()))
    model = Terrain(width, depth, omega=30.0)
    axis = torch.linspace(-1, 1, side)
    places = torch.cartesian_prod(axis, axis)
    height = heights(places, hills)
    order = torch.randperm(len(places))
    train, held_out = order[1000:], order[:1000]
    rate = 3e-4 if mended else 1e-2
    return Program(
        model=model,
        rows=TensorDataset(places[train], height[train]),
        loss=loss,
        optimizer=lambda weights: torch.optim.Adam(weights, lr=rate),
        evaluation=[places[held_out], height[held_out]],
        guilty=Guilty("explosion"),
        batch_size=512,
        steps=300,
    )
