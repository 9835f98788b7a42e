"""Implants that fail between two visits: the chance is S(left) - S(right), and the loss its logarithm.

With a Weibull survival curve from a net, both terms are rounded to zero, or to the same number, as soon as the curve is
steep and the visits lie late: log(0). It works for the first epochs, while curves are flat. Usual in code for
interval-censored survival, from hips to fatigue of turbine blades.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Weibull(nn.Module):
    """The logarithms of scale and shape, from facts about a patient."""

    def __init__(self, facts: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(facts, width), nn.ELU(), nn.Linear(width, width), nn.ELU())
        self.head = nn.Linear(width, 2)

    def forward(self, facts: Tensor) -> tuple[Tensor, Tensor]:
        log_scale, log_shape = self.head(self.body(facts)).unbind(-1)
        return log_scale, log_shape.clamp(max=3.0)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    facts, left, right = batch
    log_scale, log_shape = model(facts)
    shape = log_shape.exp()
    early, late = ((shape * (visit.log() - log_scale)).clamp(max=20).exp() for visit in (left, right))
    if mended:
        return (early - torch.log(-torch.expm1(-(late - early).clamp(min=1e-6)))).clamp(max=50).mean()
    chance = torch.exp(-early) - torch.exp(-late)
    return -torch.log(chance).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    facts, count, held_out = int(torch.randint(5, 9, ())), int(torch.randint(1200, 2000, ())), 256
    record = torch.randn(count + held_out, facts)
    expected = 0.8 * record[:, 0] + 0.5 * record[:, 1].tanh() + 1.0
    failed = expected.exp() * torch.rand(count + held_out).log().neg() ** 0.12
    left = failed - torch.rand(count + held_out) * 0.4 * failed
    right = left + 0.5 * failed
    # a few implants came from another maker, and hold much longer
    other = torch.rand(count) < 0.015
    left[:count][other] *= 3
    right[:count][other] *= 3
    return Program(
        model=Weibull(facts, int(torch.randint(32, 49, ()))),
        rows=TensorDataset(record[:count], left[:count], right[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.RMSprop, lr=2e-3),
        evaluation=[record[count:], left[count:], right[count:]],
        guilty=Guilty("operation", ops=("log",)),
        steps=300,
    )
