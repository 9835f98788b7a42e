"""A noise schedule whose last step is pure noise, and an estimate of the data that divides by what is left of it.

Zero terminal signal-to-noise ratio is recommended for diffusion models, and then predicting the noise no longer tells
the data. The clamp on the estimate hides the infinity on the way forward, but not from the slope. It takes a draw of
the very last time, whatever the rows of the batch.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


def signal_left(times: int) -> Tensor:
    """The share of the signal at each time: a cosine from one to nothing."""
    share = torch.cos(torch.linspace(0, math.pi / 2, times + 1)[1:])
    return share - share[-1]


class Denoiser(nn.Module):
    """Predicts the noise of a point in the plane at some time."""

    def __init__(self, times: int, width: int) -> None:
        super().__init__()
        self.signal = signal_left(times)
        self.noise = (1 - self.signal.square()).sqrt()
        self.body = nn.Sequential(
            nn.Linear(2 + 4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        phase = math.pi * time.unsqueeze(-1) / len(self.signal)
        return self.body(torch.cat([noisy, phase.sin(), phase.cos(), (2 * phase).sin(), (2 * phase).cos()], dim=-1))


def loss(model: nn.Module, batch: list[Tensor], least: float = 0.0) -> Tensor:
    """The error of the noise, and a little of the error of the data that it implies."""
    (points,) = batch
    generator = None if model.training else torch.Generator().manual_seed(0)  # validation is always on the same noise
    time = torch.randint(len(model.signal), (len(points),), generator=generator)
    noise = torch.randn(points.shape, generator=generator)
    signal, spread = model.signal[time].unsqueeze(-1), model.noise[time].unsqueeze(-1)
    noisy = signal * points + spread * noise
    predicted = model(noisy, time)
    estimate = (noisy - spread * predicted) / signal.clamp(min=least)  # guilty
    return (predicted - noise).square().mean() + 0.1 * (estimate.clamp(-1.5, 1.5) - points).abs().mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    times, width = int(torch.randint(300, 600, ())), int(torch.randint(48, 80, ()))
    rows, held_out = int(torch.randint(1000, 2000, ())), 512
    turn = torch.rand(rows + held_out) * 2 * math.pi
    points = torch.stack([turn.cos(), (2 * turn).sin()], dim=-1) + 0.02 * torch.randn(rows + held_out, 2)
    return Program(
        model=Denoiser(times, width),
        rows=TensorDataset(points[:rows]),
        loss=partial(loss, least=1e-2) if mended else loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[points[rows:]],
        guilty=Guilty("operation", ops=("div",)),
        batch_size=64,
    )
