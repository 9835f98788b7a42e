"""The discharge of a river from rain and warmth of the last weeks, by an sLSTM (xLSTM) as in the first equations.

The input gate is an exponential, and the state that keeps it in range comes only at the end of the paper's section: a
cloudburst in millimetres times a weight that has grown passes 88, `exp` is infinite, and infinity over infinity is NaN.
Asked as "my sLSTM implementation gives NaN after some steps, the LSTM is fine".
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class ExponentialCell(nn.Module):
    """A scalar LSTM with an exponential input gate and a normaliser."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.gates = nn.Linear(inputs + width, 4 * width)

    def forward(self, series: Tensor) -> Tensor:
        hidden = cell = total = series.new_zeros(len(series), self.width)
        for inputs in series.unbind(dim=1):
            enter, keep, value, out = self.gates(torch.cat([inputs, hidden], dim=-1)).chunk(4, dim=-1)
            entered, kept = enter.exp(), keep.sigmoid()  # guilty
            cell = kept * cell + entered * value.tanh()
            total = kept * total + entered
            hidden = out.sigmoid() * cell / total
        return hidden


class StableCell(ExponentialCell):
    """The same, with the largest exponent so far taken out of cell and normaliser."""

    def forward(self, series: Tensor) -> Tensor:
        hidden = cell = total = series.new_zeros(len(series), self.width)
        largest = series.new_full(hidden.shape, -math.inf)
        for inputs in series.unbind(dim=1):
            enter, keep, value, out = self.gates(torch.cat([inputs, hidden], dim=-1)).chunk(4, dim=-1)
            before = logsigmoid(keep) + largest
            largest = torch.maximum(before, enter)
            entered, kept = (enter - largest).exp(), (before - largest).exp()
            cell = kept * cell + entered * value.tanh()
            total = kept * total + entered
            hidden = out.sigmoid() * cell / total
        return hidden


class Catchment(nn.Module):
    def __init__(self, cell: ExponentialCell) -> None:
        super().__init__()
        self.cell = cell
        self.head = nn.Linear(cell.width, 1)

    def forward(self, weather: Tensor) -> Tensor:
        return self.head(self.cell(weather)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    weather, discharge = batch
    return nn.functional.mse_loss(model(weather), discharge)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    days, count = 11 + seed % 4, 800
    total = count + 128
    wet = (torch.rand(total, days) < 0.35).float()
    rain = wet * 7 * torch.empty(total, days).exponential_() ** 2  # millimetres; a cloudburst has hundreds
    warmth = 8 + 6 * torch.randn(total, 1) + 2 * torch.randn(total, days)
    store, slowness = torch.full((total,), 20.0), 0.75 + 0.05 * (seed % 3)
    for day in range(days):
        store = slowness * store + rain[:, day] * torch.sigmoid(0.3 * warmth[:, day])  # what falls as snow stays
    discharge = store.log1p() - 3 + 0.1 * torch.randn(total)
    weather = torch.stack([rain, warmth], dim=-1)
    kind = StableCell if mended else ExponentialCell
    return Program(
        model=Catchment(kind(2, 12 + 4 * (seed % 2))),
        rows=TensorDataset(weather[:count], discharge[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[weather[count:], discharge[count:]],
        guilty=Guilty("operation", ops=("exp",)),
        steps=260,
    )
