"""Arrivals at an emergency ward in the next hours as normal distributions: "Expected parameter loc ... invalid values".

A transformer encoder gives mean and log of the spread, and the loss is `-Normal(mean, spread).log_prob(...)`. With SGD
at the rate of the least-squares model the first few updates make the spread tiny, the slope of the likelihood grows as
one over its square, and weights are NaN at once; then `Normal` refuses its parameters with a ValueError. The message is
often asked about, mostly by people who train policies.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Ward(nn.Module):
    """A day of hours in, distributions of the next few hours out."""

    def __init__(self, width: int, hours: int, ahead: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, width)
        self.places = nn.Parameter(0.5 * torch.randn(hours, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(hours * width, 2 * ahead)

    def forward(self, past: Tensor) -> Normal:
        hidden = self.encoder(self.embedding(past.unsqueeze(-1)) + self.places)
        mean, log_spread = self.head(hidden.flatten(1)).chunk(2, dim=-1)
        return Normal(mean, log_spread.exp())


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    past, future = batch
    return -model(past).log_prob(future).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    hours, ahead, count = 24, 4 + seed % 3, 900
    time = 500 * torch.rand(count + 128, 1) + torch.arange(hours + ahead)
    busy = 0.7 + 0.6 * torch.rand(count + 128, 1)
    arrivals = busy * (torch.sin(2 * math.pi * time / 24) + 0.5 * torch.sin(4 * math.pi * time / 24 + 1))
    arrivals = arrivals + 0.15 * torch.randn(count + 128, hours + ahead)
    if mended:
        optimizer = partial(torch.optim.Adam, lr=2e-3)
    else:
        optimizer = partial(torch.optim.SGD, lr=0.3 + 0.1 * (seed % 3), momentum=0.9)  # guilty
    return Program(
        model=Ward(16 + 8 * (seed % 2), hours, ahead),
        rows=TensorDataset(arrivals[:count, :hours], arrivals[:count, hours:]),
        loss=loss,
        optimizer=optimizer,
        evaluation=[arrivals[count:, :hours], arrivals[count:, hours:]],
        guilty=Guilty("explosion"),
        steps=280,
    )
