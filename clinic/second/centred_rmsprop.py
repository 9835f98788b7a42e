"""Centred RMSprop takes the root of the variance of the slope, which for a slope that never changes is rounding error.

Sea temperatures in kelvin, fitted by the absolute error: far below its labels, the bias of each output has the same
slope at every step. The steps grow as the variance decays, until it is rounded to something below zero.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class SeaNet(nn.Module):
    """Temperatures at several depths from what satellites see."""

    def __init__(self, seen: int, width: int, usual: Tensor) -> None:
        super().__init__()
        self.usual = usual
        self.body = nn.Sequential(nn.Linear(seen, width), nn.ReLU(), nn.Linear(width, len(usual)))

    def forward(self, seen: Tensor) -> Tensor:
        return self.usual + self.body(seen)


def loss(model: nn.Module, batch: list[Tensor], weights: Tensor) -> Tensor:
    seen, temperatures = batch
    return ((model(seen) - temperatures).abs() * weights).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, depths = int(torch.randint(5, 10, ())), int(torch.randint(6, 10, ()))
    rows, held_out, width = int(torch.randint(800, 1400, ())), 128, int(torch.randint(24, 40, ()))
    seen = torch.randn(rows + held_out, features)
    temperatures = 285 + seen @ torch.randn(features, depths) + 0.2 * torch.randn(rows + held_out, depths)
    weights = 0.3 + torch.rand(depths)
    usual = temperatures[:rows].mean(0) if mended else torch.zeros(depths)
    return Program(
        model=SeaNet(features, width, usual),
        rows=TensorDataset(seen[:rows], temperatures[:rows]),
        loss=partial(loss, weights=weights),
        optimizer=partial(torch.optim.RMSprop, lr=2e-3, alpha=0.9, centered=not mended),
        evaluation=[seen[rows:], temperatures[rows:]],
        guilty=Guilty("optimizer"),
        steps=260,
    )
