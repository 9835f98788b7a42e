"""A small U-Net that learns to take noise from pictures, by Lion, with the rate of SGD left in the config.

Lion moves each weight by the whole rate at every step. The loss begins at one and hovers around it; samples are blurred
blobs, and people look for the error in the sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Lion(torch.optim.Optimizer):
    """The sign of a running mean of slopes."""

    def __init__(self, weights: Any, lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                weight.sub_(group["lr"] * mean.lerp(weight.grad, 0.1).sign())
                mean.lerp_(weight.grad, 0.01)


class Block(nn.Module):
    """Two convolutions with group norm; the time is added in between."""

    def __init__(self, inputs: int, outputs: int, times: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(4, outputs)
        self.time = nn.Linear(times, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = F.silu(self.norm(self.first(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(F.silu(hidden))


class UNet(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(2, 16), nn.SiLU())
        self.down = Block(1, channels, 16)
        self.middle = Block(channels, 2 * channels, 16)
        self.up = Block(3 * channels, channels, 16)
        self.out = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor, signal: Tensor) -> Tensor:
        time = self.time(torch.stack([signal, (1 - signal.square()).sqrt()], dim=-1))
        fine = self.down(x, time)
        coarse = self.middle(F.avg_pool2d(fine, 2), time)
        joined = torch.cat([fine, F.interpolate(coarse, scale_factor=2.0)], dim=1)
        return self.out(self.up(joined, time))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    pictures, signal, noise = batch
    if model.training:
        signal, noise = 0.05 + 0.9 * torch.rand_like(signal), torch.randn_like(noise)
    weight = signal.view(-1, 1, 1, 1)
    noisy = weight * pictures + (1 - weight.square()).sqrt() * noise
    return F.mse_loss(model(noisy, signal), noise)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, size = int(torch.randint(700, 1100, ())), 128, 12
    across = torch.linspace(-1, 1, size)
    centre, radius = 0.6 * torch.rand(rows + held_out, 2, 1, 1) - 0.3, 0.3 + 0.3 * torch.rand(rows + held_out, 1, 1)
    distance = (across[:, None] - centre[:, 0]).square() + (across[None, :] - centre[:, 1]).square()
    pictures = torch.where(distance < radius.square(), 1.0, -1.0).unsqueeze(1)
    signal, noise = 0.05 + 0.9 * torch.rand(rows + held_out), torch.randn(rows + held_out, 1, size, size)
    return Program(
        model=UNet(8 * int(torch.randint(1, 3, ()))),
        rows=TensorDataset(pictures[:rows], signal[:rows], noise[:rows]),
        loss=loss,
        optimizer=partial(Lion, lr=2e-3 if mended else 0.03),  # guilty
        evaluation=[pictures[rows:], signal[rows:], noise[rows:]],
        guilty=Guilty("explosion"),
        steps=200,
    )
