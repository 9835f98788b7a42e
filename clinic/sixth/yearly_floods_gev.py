"""The largest flood of each year along rivers, with the three parameters of an extreme value distribution by a network.

Where the shape is not zero the distribution ends somewhere, and at once, or as the network learns, a flood falls
beyond that end: the logarithm of a negative number is NaN. Hydrologists meet it in every optimiser, and give such a
point a large finite cost; the likelihood as it is in the textbook does not.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Extremes(nn.Module):
    """Place, spread and shape of the floods at a gauge."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.last = nn.Linear(width, 3)

    def forward(self, gauge: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        place, spread, shape = self.last(self.body(gauge)).chunk(3, -1)
        return place + 1, F.softplus(spread + 1), 0.4 * shape.tanh()


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    gauge, floods = batch
    place, spread, shape = model(gauge)
    inside = 1 + shape * (floods - place) / spread
    beyond = torch.zeros(())
    if mended:
        beyond = 100 * F.relu(0.05 - inside).mean()
        inside = inside.clamp(min=0.05)
    cost = spread.log() + (1 + 1 / shape) * inside.log() + inside ** (-1 / shape)  # guilty
    return cost.mean() + beyond


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, years = int(torch.randint(6, 10, ())), 12
    count, held_out = int(torch.randint(2400, 3600, ())), 200
    gauge = torch.randn(count + held_out, features)
    to_place, to_spread = (torch.randn(features, 1) / features**0.5 for _ in range(2))
    place = 1.5 * (1.0 * gauge @ to_place).exp()
    spread = 0.3 * (0.5 * gauge @ to_spread).exp()
    shape = float(torch.empty(()).uniform_(0.15, 0.25))
    chance = torch.rand(count + held_out, years).clamp(1e-4, 1 - 1e-4)
    floods = place + spread * ((-chance.log()) ** -shape - 1) / shape
    return Program(
        model=Extremes(features, int(torch.randint(96, 161, ()))),
        rows=TensorDataset(gauge[:count], floods[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[gauge[count:], floods[count:]],
        guilty=Guilty("operation", ops=("log", "pow")),
        batch_size=128,
        steps=600,
    )
