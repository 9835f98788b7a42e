"""Deep hedging: a network trades a share against a call that was sold, and minimises the entropic risk of the rest.

The risk is the logarithm of the mean of exp(-profit). A share that is squeezed to a multiple of its price within the
month costs more than 88 as long as the hedge is not full, and the exponential of that is infinite in 32 bits.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

STRIKE = 100.0


class Hedge(nn.Module):
    """How much of the share to hold, from the time that is left, its price and what is held."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1), nn.Sigmoid()
        )

    def forward(self, prices: Tensor) -> Tensor:
        """What the trades of each path earn."""
        days = prices.shape[1] - 1
        held, earned = torch.zeros_like(prices[:, 0]), torch.zeros_like(prices[:, 0])
        for day in range(days):
            left = torch.full_like(held, 1 - day / days)
            held = self.net(torch.stack([left, 5 * torch.log(prices[:, day] / STRIKE), held], dim=-1)).squeeze(-1)
            earned = earned + held * (prices[:, day + 1] - prices[:, day])
        return earned


def profits(model: nn.Module, prices: Tensor) -> Tensor:
    earned: Tensor = model(prices)
    return earned - (prices[:, -1] - STRIKE).clamp(min=0)


def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return torch.exp(-profits(model, batch[0])).mean().log()  # guilty


def mended_loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    losses = -profits(model, batch[0])
    return torch.logsumexp(losses, dim=0) - torch.tensor(float(len(losses))).log()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, days = int(torch.randint(1000, 1500, ())), 128, int(torch.randint(15, 23, ()))
    volatility = 0.015 + 0.01 * float(torch.rand(()))
    steps = volatility * torch.randn(rows + held_out, days)
    squeezed = torch.randperm(rows)[: int(torch.randint(2, 5, ()))]
    for row in squeezed.tolist():
        steps[row, int(torch.randint(days // 2, days, ()))] += float(1.3 + 0.5 * torch.rand(()))
    logarithms = torch.cat([torch.zeros(rows + held_out, 1), steps.cumsum(1)], dim=1)
    prices = STRIKE * logarithms.exp()
    return Program(
        model=Hedge(int(torch.randint(16, 33, ()))),
        rows=TensorDataset(prices[:rows]),
        loss=mended_loss if mended else loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=(prices[rows:],),
        guilty=Guilty("overflow", ops=("exp",)),
        batch_size=64,
        steps=250,
        clip=1.0,
    )
