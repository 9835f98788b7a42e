"""Returns of several shares of one day together: logistic margins, and a Gaussian copula that couples them.

The distribution function of each margin is a sigmoid, and `Normal.icdf` makes a normal number of it. Returns have long
tails. On a day with a jump of twenty spreads the sigmoid is exactly 1 in float32 (or so near 0 that `2 u - 1` is
exactly -1), `erfinv` is infinite, and the density of the copula inf - inf. Every package for copulas keeps its
uniforms away from 0 and 1 by 1e-6 or so; the formula in the lecture does not.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal, StudentT
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Copula(nn.Module):
    """Place and spread of each margin from signals of the day before, and one correlation for all days."""

    def __init__(self, signals: int, shares: int, width: int, border: float) -> None:
        super().__init__()
        self.margins = nn.Sequential(nn.Linear(signals, width), nn.Tanh(), nn.Linear(width, 2 * shares))
        self.lower = nn.Parameter(torch.zeros(shares, shares))
        self.border = border

    def forward(self, signals: Tensor, returns: Tensor) -> Tensor:
        """The logarithm of the density."""
        place, log_spread = self.margins(signals).chunk(2, -1)
        scaled = (returns - place) / log_spread.exp()
        margin = F.logsigmoid(scaled) + F.logsigmoid(-scaled) - log_spread
        uniform = scaled.sigmoid()
        if self.border:
            uniform = uniform.clamp(self.border, 1 - self.border)
        normal = Normal(0.0, 1.0)
        score = normal.icdf(uniform)  # guilty
        lower = self.lower.tril(-1) + torch.eye(len(self.lower))
        lower = lower / lower.norm(dim=-1, keepdim=True)
        joint = MultivariateNormal(torch.zeros(len(lower)), scale_tril=lower).log_prob(score)
        return joint - normal.log_prob(score).sum(-1) + margin.sum(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    signals, returns = batch
    return -model(signals, returns).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    shares, signals, held_out = int(torch.randint(4, 7, ())), 5, 300
    count = int(torch.randint(2000, 3000, ()))
    total = count + held_out
    known = torch.randn(total, signals)
    market, own = StudentT(3.0).sample((total, 1)), StudentT(3.0).sample((total, shares))
    calm = (-1.2 + 0.6 * known @ torch.randn(signals, shares) / signals**0.5).exp()
    returns = calm * (0.8 * market + 0.5 * own) + 0.2 * known @ torch.randn(signals, shares)
    returns[count:] = returns[count:].clamp(-3, 3)
    return Program(
        model=Copula(signals, shares, int(torch.randint(24, 41, ())), border=1e-6 if mended else 0.0),
        rows=TensorDataset(known[:count], returns[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[known[count:], returns[count:]],
        guilty=Guilty("operation", ops=("erfinv", "icdf")),
        batch_size=64,
        steps=320,
    )
