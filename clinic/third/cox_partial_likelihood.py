"""The partial likelihood of Cox as in textbooks: a cumulated sum of exponentials of the risk, and then its logarithm.

Survival after admission to intensive care. One in twenty patients has a laboratory value that is far from all others;
the linear risk of such a patient passes 88, where `exp` ends.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Risk(nn.Module):
    """A linear part, as in the classical model, and a small net beside it."""

    def __init__(self, values: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(values, 1, bias=False)
        self.net = nn.Sequential(nn.Linear(values, width), nn.Tanh(), nn.Linear(width, 1, bias=False))

    def forward(self, values: Tensor) -> Tensor:
        return (self.linear(values) + self.net(values)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    values, time, died = batch
    order = time.argsort(descending=True)
    risk, died = model(values)[order], died[order]
    if mended:
        at_risk = risk.logcumsumexp(0)
    else:
        at_risk = torch.log(torch.cumsum(torch.exp(risk), dim=0))  # guilty
    return -((risk - at_risk) * died).sum() / died.sum()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, width = int(torch.randint(6, 11, ())), int(torch.randint(16, 28, ()))
    rows, held_out = int(torch.randint(900, 1400, ())), 128
    values = torch.randn(rows + held_out, features)
    effect = 2.5 * torch.randn(features)
    time = -torch.rand(rows + held_out).log() / (values @ effect).exp()
    died = (torch.rand(rows + held_out) < 0.8).float()
    far = torch.randperm(rows)[: rows // 20]
    enzyme = torch.randint(3, (len(far),))
    values[far, enzyme] = 800 * (1 + torch.rand(len(far)))  # creatine kinase and others, in units per litre
    return Program(
        model=Risk(features, width),
        rows=TensorDataset(values[:rows], time[:rows], died[:rows]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[values[rows:], time[rows:], died[rows:]],
        guilty=Guilty("overflow", ops=("exp",)),
        batch_size=64,
        steps=260,
    )
