"""Behaviour cloning with a tanh-squashed Gaussian, and the driver often held the pedal at exactly 1: atanh(1) is inf.

`TransformedDistribution(Normal, TanhTransform()).log_prob(action)` on recorded, clipped actions: "SAC/BC log_prob is
inf" in many an RL repository; the usual cure is to keep the actions inside of (-1, 1).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Driver(nn.Module):
    """What the driver does, as a mean and the logarithm of a deviation."""

    def __init__(self, features: int, width: int, actions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.head = nn.Linear(width, 2 * actions)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.head(self.body(state)).chunk(2, -1)
        return mean, spread.clamp(-3, 1)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    states, actions = batch
    mean, spread = model(states)
    policy = TransformedDistribution(Normal(mean, spread.exp()), [TanhTransform()])
    if mended:
        actions = actions.clamp(-0.999, 0.999)
    return -policy.log_prob(actions).sum(-1).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, actions, count = 7 + seed % 4, 2, 1000
    states = torch.randn(4 * count, features)
    wish = torch.tanh(1.2 * states[:, :actions] - 0.5 * states[:, 2:3]) * 1.2 + 0.08 * torch.randn(4 * count, actions)
    done = wish.clamp(-1, 1)
    free = (done.abs() < 1).all(-1)
    held, free = (~free).nonzero().squeeze(-1), free.nonzero().squeeze(-1)
    chosen = torch.cat([held[:100], free[: count - 100]])[torch.randperm(count)]
    rest = free[count - 100 :][:96]
    return Program(
        model=Driver(features, int(torch.randint(32, 48, ())), actions),
        rows=TensorDataset(states[chosen], done[chosen]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[states[rest], done[rest]],
        guilty=Guilty("operation", ops=("atanh",)),
        steps=260,
    )
