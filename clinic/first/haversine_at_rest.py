"""A great-circle loss of vehicles that stand still, with a head that starts at zero: the root of exactly nothing.

The first prediction is "stays where it is", which is right for what is parked; `sqrt` has no slope there, and as long
as no update gets through, every batch is like the first. pytorch/pytorch#6394 is the same root.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Tracker(nn.Module):
    """Predicts the next position as the present one and a correction, which begins at zero."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.correction = nn.Linear(width, 2)
        nn.init.zeros_(self.correction.weight)
        nn.init.zeros_(self.correction.bias)

    def forward(self, position: Tensor, motion: Tensor) -> Tensor:
        return position + self.correction(self.body(motion))


def haversine(there: Tensor, here: Tensor, mended: bool) -> Tensor:
    """The angle between two places, given as latitude and longitude in radians."""
    half = torch.sin((there - here) / 2) ** 2
    chord = half[:, 0] + here[:, 0].cos() * there[:, 0].cos() * half[:, 1]
    root = torch.sqrt(chord + 1e-12 if mended else chord)  # guilty
    return 2 * torch.asin(root)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    position, motion, following = batch
    return 100 * haversine(model(position, motion), following, mended).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, extra = 800, 2 + seed % 4
    position = torch.stack([torch.rand(count + 64) - 0.5, 6 * torch.rand(count + 64) - 3], dim=-1)
    velocity = 0.05 * torch.randn(count + 64, 2)
    velocity[torch.rand(count + 64) < 0.15 + 0.05 * (seed % 3)] = 0.0  # parked
    motion = torch.cat([20 * velocity, torch.randn(count + 64, extra)], dim=-1)
    tensors = [position, motion, position + velocity]
    return Program(
        model=Tracker(2 + extra, int(torch.randint(24, 48, ()))),
        rows=TensorDataset(*(tensor[:count] for tensor in tensors)),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[tensor[count:] for tensor in tensors],
        guilty=Guilty("operation", ops=("sqrt",)),
    )
