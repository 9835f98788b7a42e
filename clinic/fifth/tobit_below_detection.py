"""Viral loads below what the assay can detect: a Tobit model takes `log(normal.cdf(limit))` of the censored ones.

`torch.distributions.Normal` has no `log_cdf`, so everyone writes the logarithm of the cdf. More than about five
deviations out, the cdf of a float32 is exactly zero, its logarithm is -inf, and the slope is 0 times infinity. A row
gets there only once the spread has become small, and only if its mean is still far above the limit.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Tobit(nn.Module):
    """The mean of the logarithm of a viral load from the record of a patient, and how sure that is."""

    def __init__(self, facts: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(facts, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.head = nn.Linear(width, 2)

    def forward(self, facts: Tensor) -> Normal:
        mean, spread = self.head(self.body(facts)).unbind(-1)
        return Normal(mean, F.softplus(spread) + 0.02)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    facts, load, censored = batch
    normal = model(facts)
    if mended:
        below = torch.special.log_ndtr((load - normal.loc) / normal.scale)
    else:
        below = torch.log(normal.cdf(load))  # guilty
    return -torch.where(censored, below, normal.log_prob(load)).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, facts, held_out = int(torch.randint(1200, 2000, ())), int(torch.randint(6, 10, ())), 256
    record = torch.randn(count + held_out, facts)
    true = 2.0 + 1.2 * record[:, 0] + record[:, 1] * record[:, 2].sign() + 0.15 * torch.randn(count + held_out)
    limit = float(true.quantile(0.3))
    censored = true < limit
    load = true.clamp(min=limit)
    # after therapy failed and was changed, a few patients are suppressed whatever their record says
    suppressed = torch.rand(count) < 0.006
    load[:count][suppressed], censored[:count][suppressed] = limit, True
    return Program(
        model=Tobit(facts, int(torch.randint(40, 64, ()))),
        rows=TensorDataset(record[:count], load[:count], censored[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[record[count:], load[count:], censored[count:]],
        guilty=Guilty("operation", ops=("log",)),
        steps=300,
    )
