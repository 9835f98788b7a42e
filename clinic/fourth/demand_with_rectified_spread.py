"""A probabilistic forecast of demand: a GRU gives a normal distribution for each next week, its spread through a ReLU.

For articles that nobody buys any more the best spread is 0, and once the head oversteps it the ReLU returns exactly
that. `Normal` then raises "Expected parameter scale ... to satisfy the constraint GreaterThan(lower_bound=0.0)".
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Forecaster(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gru = nn.GRU(1, hidden, batch_first=True)
        self.mean = nn.Linear(hidden, 1)
        self.spread = nn.Linear(hidden, 1)
        nn.init.ones_(self.spread.bias)

    def forward(self, weeks: Tensor) -> Normal:
        state, _ = self.gru(weeks.unsqueeze(-1))
        mean, spread = self.mean(state).squeeze(-1), self.spread(state).squeeze(-1)
        return Normal(mean, F.relu(spread))  # guilty


class MendedForecaster(Forecaster):
    def forward(self, weeks: Tensor) -> Normal:
        state, _ = self.gru(weeks.unsqueeze(-1))
        mean, spread = self.mean(state).squeeze(-1), self.spread(state).squeeze(-1)
        return Normal(mean, F.softplus(spread) + 0.02)


def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    (series,) = batch
    nll: Tensor = -model(series[:, :-1]).log_prob(series[:, 1:])
    return nll.mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, weeks = int(torch.randint(700, 1000, ())), 64, int(torch.randint(26, 36, ()))
    level = 0.5 + 1.5 * torch.rand(rows + held_out, 1)
    phase = 6.3 * torch.rand(rows + held_out, 1)
    season = 1 + 0.8 * torch.sin(phase + torch.arange(weeks) * 2 * torch.pi / 13)
    demand = level * season * (1 + 0.1 * torch.randn(rows + held_out, weeks))
    leaves = torch.randint(4, weeks, (rows + held_out, 1))  # the shop stops selling it
    gone = torch.rand(rows + held_out, 1) < 0.3
    demand = torch.where(gone & (torch.arange(weeks) >= leaves), torch.zeros(()), demand)
    hidden = int(torch.randint(24, 41, ()))
    return Program(
        model=MendedForecaster(hidden) if mended else Forecaster(hidden),
        rows=TensorDataset(demand[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.RMSprop, lr=2e-3),
        evaluation=(demand[rows:],),
        guilty=Guilty("operation", ops=("relu", "Normal")),
        batch_size=32,
        steps=250,
    )
