"""A camera in a pond looks up through waves: sqrt(1 - (n sin)^2) of Snell's law ends at 48.6 degrees.

A network tells the tilt of the surface from the glitter. All measured rays did leave the water, but a tilt that is a
little wrong puts a steep one into total reflection, where the root is of a negative number. In differentiable ray
tracers "refraction returns nan"; pbrt and Mitsuba return whether there was total reflection, and mask.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

INDEX = 1.33


class Waves(nn.Module):
    """The tilt of the surface, in radians."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.tilt = nn.Linear(width, 1)

    def forward(self, glitter: Tensor) -> Tensor:
        return 0.6 * torch.tanh(self.tilt(self.body(glitter))).squeeze(-1)


def refracted(angle: Tensor, least: float | None = None) -> Tensor:
    """The direction in the air: along the surface, and away from it."""
    sine = INDEX * torch.sin(angle)
    rest = 1 - sine * sine
    if least is not None:
        rest = rest.clamp(min=least)
    cosine = torch.sqrt(rest)  # guilty
    return torch.stack([sine, cosine], dim=-1)


def loss(model: nn.Module, batch: list[Tensor], *, least: float | None) -> Tensor:
    glitter, angle, seen = batch
    return nn.functional.mse_loss(refracted(angle + model(glitter), least), seen)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 8 + seed % 5, 1200
    rows = count + 128
    glitter = torch.randn(rows, features)
    tilt = 0.3 * torch.tanh(glitter @ torch.randn(features) / 2) + 0.15 * torch.sin(glitter[:, 0] * 2)
    inside = -0.6 + 1.35 * torch.rand(rows)  # the angle to the true normal, below the critical 0.85
    seen = refracted(inside) + 0.01 * torch.randn(rows, 2)
    angle = inside - tilt
    return Program(
        model=Waves(features, int(torch.randint(96, 129, ()))),
        rows=TensorDataset(glitter[:count], angle[:count], seen[:count]),
        loss=partial(loss, least=1e-2 if mended else None),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[glitter[count:], angle[count:], seen[count:]],
        guilty=Guilty("operation", ops=("sqrt",)),
        steps=3000,
    )
