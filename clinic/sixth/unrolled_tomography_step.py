"""Tomography with few rays: six steps of gradient descent, with a small network after each, trained as a whole.

The length of a step is a weight that begins at 0.5, as in the code of ISTA-Net, whose measurements have norm one. Rays
add up the pixels that they meet, so that here the norm squared is about ten: each step multiplies the error by four
in place of making it smaller, and so does each step back. SGD is at NaN after a few updates. Begin at one over it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

SIZE, ANGLES = 14, 9


class Unrolled(nn.Module):
    """A step towards the measurements, then what a network adds to it; six times."""

    def __init__(self, rays: Tensor, width: int, step: float) -> None:
        super().__init__()
        self.rays: Tensor
        self.register_buffer("rays", rays)
        self.steps = nn.Parameter(torch.full((6,), step))
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 3, padding=1))
            for _ in range(6)
        )

    def forward(self, measured: Tensor) -> Tensor:
        picture = measured.new_zeros(len(measured), SIZE**2)
        for step, net in zip(self.steps, self.nets, strict=True):
            picture = picture - step * (picture @ self.rays.T - measured) @ self.rays
            picture = picture + net(picture.view(-1, 1, SIZE, SIZE)).flatten(1)
        return picture


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    measured, picture = batch
    return F.mse_loss(model(measured), picture)


def strips(pixel: float) -> Tensor:
    """Which pixels the strips of each angle meet, weighed by the size of a pixel."""
    place = torch.arange(SIZE) - (SIZE - 1) / 2
    angles = torch.pi * torch.arange(ANGLES) / ANGLES
    along = angles.cos()[:, None, None] * place[:, None] + angles.sin()[:, None, None] * place
    strip = (along + SIZE * 0.72).floor().clamp(0, int(SIZE * 1.44) - 1).long().flatten(1)
    return pixel * F.one_hot(strip, int(SIZE * 1.44)).mT.flatten(0, 1).float()


def discs(count: int) -> Tensor:
    """Three discs of some density each."""
    grid = torch.arange(SIZE)
    y, x, radius, density = torch.empty(4, count, 3, 1, 1).uniform_(0.2, 0.8)
    far = (grid[:, None] - SIZE * y).square() + (grid - SIZE * x).square()
    return (density * (far < (SIZE * 0.3 * radius).square())).sum(1).flatten(1)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rays = strips(float(torch.empty(()).uniform_(0.25, 0.3)))
    picture, held_out = discs(int(torch.randint(700, 1000, ()))), discs(128)
    step = 1 / float(torch.linalg.matrix_norm(rays, 2)) ** 2 if mended else 0.5
    noisy = [image @ rays.T + 0.01 * torch.randn(len(image), len(rays)) for image in (picture, held_out)]
    return Program(
        model=Unrolled(rays, int(torch.randint(12, 17, ())), step),
        rows=TensorDataset(noisy[0], picture),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.9),
        evaluation=[noisy[1], held_out],
        guilty=Guilty("explosion"),
        batch_size=16,
        steps=300,
    )
