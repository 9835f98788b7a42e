"""The smile of SABR divides z by x(z), and a strike that equals the forward has z = 0: nought by nought.

Hagan's formula has a limit there, and every second notebook on GitHub lacks the branch for it ("SABR nan at the
money"). Strikes and forwards are listed in whole ticks, so now and then they are the same number.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


def smile(level: Tensor, skew: Tensor, wing: Tensor, moneyness: Tensor, years: Tensor, mended: bool) -> Tensor:
    """The lognormal volatility of Hagan et al. for beta = 1; moneyness is log(forward / strike)."""
    z = wing / level * moneyness
    if mended:
        near = z.abs() < 1e-3
        safe = torch.where(near, torch.full_like(z, 0.1), z)
        x = torch.log((torch.sqrt(1 - 2 * skew * safe + safe**2) + safe - skew) / (1 - skew))
        bend = torch.where(near, 1 - 0.5 * skew * z, safe / x)
    else:
        x = torch.log((torch.sqrt(1 - 2 * skew * z + z**2) + z - skew) / (1 - skew))
        bend = z / x  # guilty
    drift = skew * wing * level / 4 + (2 - 3 * skew**2) * wing**2 / 24
    return level * bend * (1 + drift * years)


class Surface(nn.Module):
    """From the state of a market to the three parameters of its smile."""

    def __init__(self, features: int, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.body = nn.Sequential(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.head = nn.Linear(width, 3)

    def forward(self, state: Tensor, moneyness: Tensor, years: Tensor) -> Tensor:
        level, skew, wing = self.head(self.body(state)).unbind(-1)
        level, wing = 0.05 + 0.3 * torch.sigmoid(level), 0.1 + nn.functional.softplus(wing)
        return smile(level, 0.9 * torch.tanh(skew), wing, moneyness, years, self.mended)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    state, moneyness, years, quoted = batch
    return (model(state, moneyness, years).log() - quoted.log()).pow(2).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 4 + seed % 3, 3000
    size = count + 128
    state, years = torch.randn(size, features), 0.1 + 0.9 * torch.rand(size)
    forward = torch.randint(180, 221, (size,))
    strike = (forward * torch.exp(0.15 * torch.randn(size))).round().long()
    strike[count:] += (strike[count:] == forward[count:]).long()
    moneyness = torch.log(forward.float() / strike)
    level = 0.1 + 0.15 * torch.sigmoid(state[:, 0])
    skew, wing = -0.3 + 0.4 * torch.tanh(state[:, 1]), 0.5 + nn.functional.softplus(state[:, 2])
    quoted = smile(level, skew, wing, moneyness, years, True) * torch.exp(0.02 * torch.randn(size))
    return Program(
        model=Surface(features, int(torch.randint(48, 65, ())), mended),
        rows=TensorDataset(state[:count], moneyness[:count], years[:count], quoted[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[state[count:], moneyness[count:], years[count:], quoted[count:]],
        guilty=Guilty("operation", ops=("div", "true_divide")),
        steps=1800,
    )
