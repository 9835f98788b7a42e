"""A physics residual that is divided by the square of the time step, trained at the rate of the data term alone.

The network tells the swing of a damped pendulum from how it is let go. With dt = 0.1 the second difference has a
factor of 100, and its square one of 10,000: SGD at the rate that was right for the plain squared error goes up from
the first step on and is infinite a few steps later. "PINN loss explodes when I add the residual term"; the answer is
another rate (or weight of the residual).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Swing(nn.Module):
    """Gives the angle at all times from the first angle, the first speed, the frequency and the damping."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, times)
        )

    def forward(self, settings: Tensor) -> Tensor:
        return self.net(settings)


STEP = 0.1


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    settings, angles = batch
    told = model(settings)
    _, _, frequency, damping = settings.unsqueeze(-1).unbind(1)
    inner = told[:, 1:-1]
    acceleration = (told[:, 2:] - 2 * inner + told[:, :-2]) / STEP**2
    speed = (told[:, 2:] - told[:, :-2]) / (2 * STEP)
    residual = acceleration + 2 * damping * speed + frequency**2 * inner
    return nn.functional.mse_loss(told, angles) + residual.square().mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    times, count = 20 + 2 * (seed % 4), 800
    settings = torch.rand(count + 64, 4) * torch.tensor([2.0, 2.0, 1.0, 0.4]) + torch.tensor([-1.0, -1.0, 1.0, 0.1])
    first, pace, frequency, damping = settings.unsqueeze(-1).unbind(1)
    time = STEP * torch.arange(times)
    true = (frequency**2 - damping**2).sqrt()
    angles = torch.exp(-damping * time) * (
        first * torch.cos(true * time) + (pace + damping * first) / true * torch.sin(true * time)
    )
    return Program(
        model=Swing(int(torch.randint(32, 49, ())), times),
        rows=TensorDataset(settings[:count], angles[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=2e-5 if mended else 2e-2, momentum=0.9),  # guilty
        evaluation=[settings[count:], angles[count:]],
        guilty=Guilty("explosion"),
        steps=300,
    )
