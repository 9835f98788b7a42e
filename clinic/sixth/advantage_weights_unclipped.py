"""Bidding for energy storage, learned offline: advantage-weighted regression over logged bids and what they earned.

Each logged action counts with exp(advantage / temperature). Most days earn a few euros more or less than expected; a
few with a shortage in the grid earn a thousand, and `exp` of their advantage is infinite. Implementations of AWAC and
IQL all end in `clamp(max=100)`, and reimplementations from the formula in the paper do not.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

MOST = 20.0


class Trader(nn.Module):
    """A Gaussian policy, and the value of a state."""

    def __init__(self, signals: int, actions: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(signals, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.mean, self.value = nn.Linear(width, actions), nn.Linear(width, 1)
        self.log_spread = nn.Parameter(torch.zeros(actions))

    def forward(self, state: Tensor) -> tuple[Independent, Tensor]:
        hidden = self.body(state)
        policy = Independent(Normal(self.mean(hidden), self.log_spread.exp()), 1)
        return policy, self.value(hidden).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor], *, temperature: float, clamped: bool) -> Tensor:
    state, action, earned = batch
    policy, value = model(state)
    advantage = (earned - value.detach()) / temperature
    weight = advantage.exp()  # guilty
    if clamped:
        weight = weight.clamp(max=MOST)
    imitation = -(weight * policy.log_prob(action)).mean()
    return imitation + 0.1 * F.smooth_l1_loss(value, earned)


def days(count: int, best: Tensor, shortage: float) -> list[Tensor]:
    """Bids around the best one, what they earned, and now and then a price without any relation to them."""
    state = torch.randn(count, len(best))
    right = (state @ best).tanh()
    action = right + 0.5 * torch.randn_like(right)
    earned = 3 - 6 * (action - right).square().sum(-1) + 2 * state[:, 0] + 0.5 * torch.randn(count)
    scarce = torch.rand(count) < shortage
    return [state, action, torch.where(scarce, earned + 1000 * torch.rand(count), earned)]


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    signals, actions = int(torch.randint(5, 8, ())), 3
    best = torch.randn(signals, actions) / signals**0.5
    return Program(
        model=Trader(signals, actions, int(torch.randint(32, 49, ()))),
        rows=TensorDataset(*days(int(torch.randint(2500, 3500, ())), best, 0.004)),
        loss=partial(loss, temperature=3.0, clamped=mended),
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=days(400, best, 0.0),
        guilty=Guilty("overflow", ops=("exp",)),
        batch_size=64,
        steps=400,
    )
