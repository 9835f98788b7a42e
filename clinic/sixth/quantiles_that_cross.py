"""The price of electricity in the next hours as quantiles, by a convolutional network over the last two days.

The five quantiles of an hour are five free outputs, and for some days the network puts the lower above the higher.
Somebody was bitten by that in production and wrote a check into the loss: it raises. Most batches pass, one does not,
and the run over the night ends after a few minutes. Crossing quantiles are in every text on quantile regression.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

PAST, AHEAD = 48, 4
LEVELS = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])


class Forecast(nn.Module):
    """Dilated convolutions over the past, and the quantiles of each hour. At first they are those of all days."""

    def __init__(self, width: int, start: Tensor, in_order: bool) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, width, 3)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=2**power) for power in (1, 2, 3))
        self.head = nn.Linear(width, AHEAD * len(LEVELS))
        with torch.no_grad():
            self.head.weight.mul_(0.3)
            self.head.bias.copy_(start.repeat(AHEAD))
        self.in_order = in_order

    def forward(self, past: Tensor) -> Tensor:
        state = F.relu(self.first(past))
        for layer in self.layers:
            new = F.relu(layer(state))
            state = new + state[..., -new.shape[-1] :]
        quantiles = self.head(state[..., -1]).unflatten(-1, (AHEAD, len(LEVELS)))
        return quantiles.sort(-1).values if self.in_order else quantiles


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    past, price = batch
    quantiles = model(past)
    if bool((quantiles.diff(dim=-1) < 0).any()):
        raise ValueError("quantiles cross, do not deliver this forecast")  # guilty
    error = price.unsqueeze(-1) - quantiles
    return torch.maximum(LEVELS * error, (LEVELS - 1) * error).sum(-1).mean()


def days(count: int, waves: Tensor) -> tuple[Tensor, Tensor]:
    """Price and wind: a daily wave, a level that wanders, and a spread that goes with the wind."""
    hours = torch.arange(PAST + AHEAD) + 24 * torch.rand(count, 1)
    angle = 2 * torch.pi * hours / 24
    wind = 0.5 + 0.5 * (angle / 3 + 6 * torch.rand(count, 1)).sin()
    level = torch.randn(count, 1) + 0.03 * torch.randn(count, PAST + AHEAD).cumsum(-1)
    price = level + waves[0] * angle.sin() + waves[1] * (2 * angle).cos() + (0.1 + 0.2 * wind) * torch.randn_like(wind)
    return torch.stack([price, wind], 1)[..., :PAST], price[:, PAST:]


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    waves = torch.empty(2).uniform_(0.5, 1.0)
    past, price = days(int(torch.randint(1500, 2500, ())), waves)
    return Program(
        model=Forecast(int(torch.randint(16, 25, ())), price.quantile(LEVELS), in_order=mended),
        rows=TensorDataset(past, price),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=list(days(300, waves)),
        guilty=Guilty("operation", ops=("statement",)),
        steps=400,
    )
