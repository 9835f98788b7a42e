"""Whether a frog is heard at a pond, by its habitat and the minutes listened: the complementary log-log link, by hand.

Calls come as Poisson numbers, so the chance to hear at least one is `1 - exp(-minutes * rate)`, and its logarithm is
the likelihood. Where the rate has become small, `exp` rounds to one, the chance to zero, `log(0)` is minus infinity:
its slope meets a zero and is NaN. `log(-expm1(-x))` would do. Met in occupancy models and in survival with the cloglog
link, and wherever people ask for a stable log(1 - exp(-x)).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Calls(nn.Module):
    """The logarithm of the rate of calls, of a habitat."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, habitats: Tensor) -> Tensor:
        return self.layers(habitats).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor], stable: bool) -> Tensor:
    habitats, minutes, heard = batch
    calls = minutes * model(habitats).clamp(max=12).exp()
    if stable:
        some = torch.log(-torch.expm1(-calls.clamp(min=1e-30)))
    else:
        some = torch.log(1 - torch.exp(-calls))  # guilty
    return -(heard * some - (1 - heard) * calls).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 4 + seed % 4, 1200
    habitats = torch.randn(count + 256, features)
    minutes = 5 + 10 * torch.rand(count + 256)
    wet = torch.randn(features)
    rate = torch.exp(-4 + 7 * (habitats @ wet / wet.norm()) + 1.5 * torch.sin(2 * habitats[:, 0]))
    heard = (torch.rand(count + 256) < -torch.expm1(-minutes * rate)).float()
    return Program(
        model=Calls(features, int(torch.randint(24, 40, ()))),
        rows=TensorDataset(habitats[:count], minutes[:count], heard[:count]),
        loss=partial(loss, stable=mended),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[habitats[count:], minutes[count:], heard[count:]],
        guilty=Guilty("operation", ops=("log",)),
        steps=300,
    )
