"""Vital signs that are taken now and then, by a GRU-D: the decay of its state lacks the max(0, ...) of the paper.

gamma = exp(-(W * gap + b)) is between 0 and 1 only if what is in the brackets is positive. W is drawn with both signs,
so half of the state does not fade while nobody measures: it grows by orders of magnitude over a quiet night. The first
loss is 1e20 and its slopes are infinite. Asked as "GRU-D loss is nan after the first iterations".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class GRUD(nn.Module):
    """A GRU whose state fades with the time since each sign was last measured."""

    def __init__(self, signs: int, size: int, least: float | None) -> None:
        super().__init__()
        self.decay = nn.Linear(signs, size)
        self.cell = nn.GRUCell(2 * signs, size)
        self.risk = nn.Linear(size, 1)
        self.size, self.least = size, least

    def forward(self, values: Tensor, measured: Tensor, gaps: Tensor) -> Tensor:
        state = values.new_zeros(len(values), self.size)
        for visit in range(values.shape[1]):
            rate = self.decay(gaps[:, visit])
            if self.least is not None:
                rate = rate.clamp(min=self.least)
            state = torch.exp(-rate) * state  # guilty
            state = self.cell(torch.cat([values[:, visit], measured[:, visit]], dim=-1), state)
        return self.risk(state).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    *series, worse = batch
    return nn.functional.binary_cross_entropy_with_logits(model(*series), worse)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    signs, visits, count = 4 + seed % 3, 12, 900
    hours = torch.empty(count + 128, visits).exponential_(1 / (1.5 + 0.5 * (seed % 2))).clamp(0.25, 24).cumsum(dim=1)
    measured = (torch.rand(count + 128, visits, signs) < 0.5).float()
    values = measured * (torch.randn(count + 128, 1, signs) + torch.randn(count + 128, visits, signs))
    last = torch.where(measured.bool(), hours.unsqueeze(-1), hours[:, :1, None]).cummax(dim=1).values
    gaps = hours.unsqueeze(-1) - torch.cat([last[:, :1], last[:, :-1]], dim=1)
    weight = torch.exp(-(hours[:, -1:] - hours) / 5).unsqueeze(-1) * torch.randn(signs)
    worse = ((weight * values).sum(dim=(1, 2)) > 0).float()
    series = values, measured, gaps
    return Program(
        model=GRUD(signs, int(torch.randint(20, 32, ())), 0.0 if mended else None),
        rows=TensorDataset(*(one[:count] for one in (*series, worse))),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[one[count:] for one in (*series, worse)],
        guilty=Guilty("overflow", ops=("exp",)),
        steps=260,
    )
