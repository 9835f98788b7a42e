"""A net gives the volatility of options from the market, through the formula of Black and Scholes, fitted to prices.

The list holds options on the day that they expire, at the price of the share: there d1 is 0 / 0, and where the strike
is another the cdf has a value but its slope is 0 times infinity. Everybody who fits a surface of volatility by
autograd to a dump of an exchange finds this in the first epoch.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Surface(nn.Module):
    """Volatility from the moneyness, the years that are left, and the state of the market."""

    def __init__(self, states: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(2 + states, width), nn.Softplus(), nn.Linear(width, width), nn.Softplus(), nn.Linear(width, 1)
        )

    def forward(self, moneyness: Tensor, years: Tensor, market: Tensor) -> Tensor:
        return F.softplus(self.body(torch.cat([moneyness[:, None], years[:, None], market], -1)).squeeze(-1)) + 0.01


def price(volatility: Tensor, moneyness: Tensor, years: Tensor) -> Tensor:
    """What a call is worth, as a share of its strike; the moneyness is the logarithm of spot over strike."""
    spread = volatility * years.sqrt()
    first = moneyness / spread + spread / 2  # guilty
    cdf = Normal(torch.zeros(()), torch.ones(()), validate_args=False).cdf
    return moneyness.exp() * cdf(first) - cdf(first - spread)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    moneyness, years, market, paid = batch
    if mended:
        years = years.clamp(min=1e-4)
    return (price(model(moneyness, years, market), moneyness, years) - paid).abs().mean() * 100


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    states, count, held_out = int(torch.randint(2, 5, ())), int(torch.randint(1500, 2500, ())), 256
    total = count + held_out
    market = torch.randn(total, states)
    moneyness, years = 0.15 * torch.randn(total), torch.empty(total).uniform_(0.02, 2.0)
    true = (0.2 + 0.06 * market[:, 0] + 0.5 * moneyness.square() - 0.2 * moneyness).clamp(min=0.05)
    last_day = torch.zeros(total, dtype=torch.bool)
    last_day[:count] = torch.rand(count) < float(torch.empty(()).uniform_(0.03, 0.05))
    paid = torch.where(last_day, (moneyness.exp() - 1).clamp(min=0), price(true, moneyness, years))
    years = years.masked_fill(last_day, 0.0)
    return Program(
        model=Surface(states, int(torch.randint(32, 49, ()))),
        rows=TensorDataset(moneyness[:count], years[:count], market[:count], paid[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[moneyness[count:], years[count:], market[count:], paid[count:]],
        guilty=Guilty("operation", ops=("div", "sqrt")),
        batch_size=32,
        steps=400,
    )
