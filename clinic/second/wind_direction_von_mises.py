"""The likelihood of a direction needs the logarithm of a Bessel function, and the function leaves the range of floats.

A von Mises distribution of the wind's direction. The more certain the forecast becomes, the larger the concentration,
and the Bessel function of about 92 is infinite in single precision. The first dozens of steps are fine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class WindNet(nn.Module):
    """Reads the wind at neighbouring stations; tells the direction and how certain it is."""

    def __init__(self, stations: int, width: int) -> None:
        super().__init__()
        self.direct = nn.Linear(2 * stations, 2)
        self.body = nn.Sequential(nn.Linear(2 * stations, width), nn.GELU(), nn.Linear(width, 2))
        self.certainty = nn.Linear(width, 1)

    def forward(self, winds: Tensor) -> tuple[Tensor, Tensor]:
        flat = winds.flatten(1)
        hidden = self.body[1](self.body[0](flat))
        east, north = (self.direct(flat) + self.body[2](hidden)).unbind(-1)
        return torch.atan2(north, east), self.certainty(hidden).squeeze(-1).exp()


def log_bessel(concentration: Tensor) -> Tensor:
    return torch.special.i0(concentration).log()  # guilty


def scaled_log_bessel(concentration: Tensor) -> Tensor:
    return torch.special.i0e(concentration).log() + concentration


def loss(model: nn.Module, batch: list[Tensor], log_normaliser: Callable[[Tensor], Tensor] = log_bessel) -> Tensor:
    winds, direction = batch
    centre, concentration = model(winds)
    log_density = concentration * torch.cos(direction - centre) - log_normaliser(concentration)
    return math.log(2 * math.pi) - log_density.mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    stations, width = int(torch.randint(3, 7, ())), int(torch.randint(32, 56, ()))
    rows, held_out = int(torch.randint(1000, 1600, ())), 128
    direction = (2 * torch.rand(rows + held_out) - 1) * math.pi
    lag = 0.3 * torch.randn(stations)
    seen = direction.unsqueeze(-1) + lag + 0.03 * torch.randn(rows + held_out, stations)
    speed = 1 + 0.5 * torch.rand(rows + held_out, 1, 1)
    winds = speed * torch.stack([seen.cos(), seen.sin()], dim=-1)
    return Program(
        model=WindNet(stations, width),
        rows=TensorDataset(winds[:rows], direction[:rows]),
        loss=partial(loss, log_normaliser=scaled_log_bessel) if mended else loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[winds[rows:], direction[rows:]],
        guilty=Guilty("overflow", ops=("i0", "special_i0")),
    )
