"""A forecast of sales is scaled by the mean of the last weeks, as in DeepAR, and some articles were not sold at all.

Zero over zero, in the input and in the mean of a negative binomial distribution. Spare parts are like that: one in
eight windows has no sale.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import NegativeBinomial
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class DeepAR(nn.Module):
    """A recurrent net over the weeks that are known tells the distribution of the next ones."""

    def __init__(self, horizon: int, width: int, mended: bool) -> None:
        super().__init__()
        self.least = 0.1 if mended else 0.0
        self.recur = nn.GRU(1, width, batch_first=True)
        self.head = nn.Linear(width, horizon + 1)

    def forward(self, known: Tensor) -> NegativeBinomial:
        scale = known.mean(1, keepdim=True).clamp(min=self.least)
        scaled = known / scale  # guilty
        out = self.head(self.recur(scaled.unsqueeze(-1))[0][:, -1])
        mean = scale * F.softplus(out[:, 1:]) + 1e-3
        count = F.softplus(out[:, :1]) + 0.1
        return NegativeBinomial(count, logits=(mean / count).log(), validate_args=False)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    known, future = batch
    return -model(known).log_prob(future).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    season, horizon, known = int(torch.randint(5, 8, ())), int(torch.randint(3, 6, ())), 21
    rows, held_out = int(torch.randint(800, 1300, ())), 128
    weeks = torch.arange(known + horizon) + torch.randint(season, (rows + held_out, 1))
    profile = 20 * (torch.arange(season) % season == 0).float() + 0.05
    level = (0.5 + 0.8 * torch.randn(rows + held_out, 1)).exp()
    sales = torch.poisson(level * profile[weeks % season])
    sold = sales[:, :known].sum(1) > 0
    sales[~sold, 0] = 1.0
    unsold = torch.randperm(rows)[: rows // 8]
    sales[unsold, :known] = 0.0
    return Program(
        model=DeepAR(horizon, int(torch.randint(20, 32, ())), mended),
        rows=TensorDataset(sales[:rows, :known], sales[:rows, known:]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[sales[rows:, :known], sales[rows:, known:]],
        guilty=Guilty("operation", ops=("div",)),
        steps=240,
    )
