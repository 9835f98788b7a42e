"""Which accounts belong to one ring: a kernel of their distances, taken in half precision as |a|^2 + |b|^2 - 2ab.

It saves memory, and holds as long as nobody makes more than 255 transfers a month: the square of 256 is beyond
float16, and infinity minus infinity is no distance. Shops do.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Rings(nn.Module):
    """Passes messages between accounts that behave alike."""

    def __init__(self, features: int, width: int, mended: bool) -> None:
        super().__init__()
        self.kind = torch.float32 if mended else torch.float16
        self.weights = nn.Parameter(torch.ones(2))
        self.message = nn.Linear(features, width)
        self.out = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, counts: Tensor, traits: Tensor) -> Tensor:
        habits = (counts * self.weights).to(self.kind)
        lengths = habits.pow(2).sum(-1)  # guilty
        apart = lengths.unsqueeze(-1) + lengths.unsqueeze(-2) - 2 * habits @ habits.mT
        alike = torch.softmax(-apart.float().clamp(min=0) / 200, -1)
        hidden = torch.tanh(self.message(traits))
        return self.out(torch.cat([hidden, alike @ hidden], -1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    counts, traits, risk = batch
    return nn.functional.mse_loss(model(counts, traits), risk)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    accounts, features, count = 10 + seed % 4, 4, 1500
    size = count + 128
    ring = torch.randint(3, (size, accounts))
    counts = 40 * torch.rand(3, 2)[ring] + 20 + 3 * torch.randn(size, accounts, 2)
    counts = counts.round().clamp(min=0)
    shops = torch.rand(count, accounts) < 0.002
    counts[:count][shops] = torch.randint(260, 700, (int(shops.sum()), 2)).float()
    traits = torch.randn(size, accounts, features)
    trait = torch.tanh(traits @ torch.randn(features))
    same = torch.softmax(-(torch.cdist(counts, counts) ** 2) / 200, -1)
    risk = 2 * (same @ trait.unsqueeze(-1)).squeeze(-1) + 0.5 * trait + 0.1 * torch.randn(size, accounts)
    return Program(
        model=Rings(features, int(torch.randint(20, 33, ())), mended),
        rows=TensorDataset(counts[:count], traits[:count], risk[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=4e-3),
        evaluation=[counts[count:], traits[count:], risk[count:]],
        guilty=Guilty("overflow", ops=("pow", "sum")),
        steps=900,
    )
