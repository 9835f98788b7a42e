"""The form of footballers over the next matches, by a transformer and a loss that is one minus the correlation.

Scouts care for ups and downs and not for the level, so that each player's forecast is correlated with what came. Who
was injured has zero minutes in every match: a spread of zero, and the correlation is 0 / 0. Correlation as a loss is
asked about often; few answers mention a series that stands still.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Form(nn.Module):
    """A transformer over the matches that have been, with as many outputs as matches to come."""

    def __init__(self, features: int, width: int, past: int, ahead: int) -> None:
        super().__init__()
        self.inner, self.place = nn.Linear(features, width), nn.Parameter(0.02 * torch.randn(past, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, ahead)

    def forward(self, matches: Tensor) -> Tensor:
        return self.head(self.body(self.inner(matches) + self.place).mean(1))


def loss(model: nn.Module, batch: list[Tensor], floor: float) -> Tensor:
    matches, minutes = batch
    guess = model(matches)
    guess, right = guess - guess.mean(-1, keepdim=True), minutes - minutes.mean(-1, keepdim=True)
    together = (guess * right).sum(-1)
    alone = guess.square().sum(-1).sqrt() * right.square().sum(-1).sqrt()
    return 1 - (together / (alone + floor)).mean()  # guilty


def players(count: int, past: int, ahead: int, injured: float) -> tuple[Tensor, Tensor]:
    """Minutes, goals and rest of each match; form comes in waves."""
    match = torch.arange(past + ahead)
    wave = (0.6 + 0.3 * torch.rand(count, 1)) * match + 2 * torch.pi * torch.rand(count, 1)
    minutes = (45 + 40 * wave.sin() + 4 * torch.randn(count, past + ahead)).clamp(0, 90) / 90
    minutes[:, past:] *= (torch.rand(count, 1) >= injured).float()
    goals, rest = torch.poisson(0.6 * minutes), torch.randn(minutes.shape)
    return torch.stack([minutes - 0.5, goals, rest], dim=-1)[:, :past], minutes[:, past:]


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    past, ahead = int(torch.randint(10, 14, ())), int(torch.randint(5, 8, ()))
    data = players(int(torch.randint(1200, 1800, ())), past, ahead, injured=0.06)
    held_out = players(250, past, ahead, injured=0.0)
    return Program(
        model=Form(3, 32, past, ahead),
        rows=TensorDataset(*data),
        loss=partial(loss, floor=1e-6 if mended else 0.0),
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        evaluation=list(held_out),
        guilty=Guilty("operation", ops=("div", "truediv", "true_divide")),
        steps=300,
    )
