"""Who wins a match, by a probit: the logarithm of `Normal(0, 1).cdf(...)`, as Thurstone's model is written down.

In single precision the cumulative normal is exactly zero from five and a half deviations on. Points of the ranking are
far apart between a champion and a newcomer, and now and then a newcomer wins. `torch.special.log_ndtr` is what people
are told to use.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Match(nn.Module):
    """How far the first player is ahead: antisymmetric in both."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.form = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 1))
        self.points = nn.Linear(features, 1, bias=False)

    def strength(self, player: Tensor) -> Tensor:
        return (self.form(player) + self.points(player)).squeeze(-1)

    def forward(self, winner: Tensor, loser: Tensor) -> Tensor:
        return self.strength(winner) - self.strength(loser)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    ahead = model(*batch)
    if mended:
        return -torch.special.log_ndtr(ahead).mean()
    return -torch.log(Normal(0.0, 1.0).cdf(ahead)).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    matches, held_out, features = int(torch.randint(1500, 2200, ())), 512, int(torch.randint(6, 10, ()))
    every = matches + held_out
    players = torch.randn(every, 2, features)
    players[:, :, 0] = torch.exp(0.7 + 1.2 * torch.randn(every, 2))  # thousands of points
    players[matches:, :, 0] = torch.exp(0.3 * torch.randn(held_out, 2))  # what is judged are matches of equals
    effect = torch.randn(features)
    effect[0] = 0.3 * effect.norm()
    strength = 1.5 * (players @ (effect / effect.norm())) + 0.8 * torch.sin(2 * players[:, :, 1])
    surprise = torch.rand(every) < 0.02
    first = (strength[:, 0] - strength[:, 1] + torch.randn(every) > 0) ^ surprise
    order = torch.where(first.view(-1, 1, 1), players, players.flip(1))
    winner, loser = order[:, 0], order[:, 1]
    return Program(
        model=Match(features, int(torch.randint(16, 32, ()))),
        rows=TensorDataset(winner[:matches], loser[:matches]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[winner[matches:], loser[matches:]],
        guilty=Guilty("operation", ops=("log",)),
        batch_size=64,
        steps=300,
    )
