"""Keypoint heatmaps with a squared error that is summed over the pixels, and the rate of a mean: gone in a few steps.

The habit: `reduction="sum"` from one repository, SGD at 0.1 with momentum from another. "Heatmap regression loss goes
to nan after the first iterations" is what people then ask.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Hourglass(nn.Module):
    """Down, up, and a skip between."""

    def __init__(self, channels: int, points: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.head = nn.Conv2d(channels, points, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = nn.functional.relu(self.stem(images))
        coarse = nn.functional.relu(self.middle(nn.functional.relu(self.down(fine))))
        return self.head(nn.functional.relu(fine + self.up(coarse)))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, heat = batch
    return nn.functional.mse_loss(model(images), heat, reduction="sum") / len(images)


def blobs(centres: Tensor, size: int, width: float) -> Tensor:
    """A Gaussian about each centre."""
    grid = torch.arange(size, dtype=torch.float32)
    across = (grid.reshape(1, 1, 1, size) - centres[..., 0].reshape(*centres.shape[:2], 1, 1)) ** 2
    down = (grid.reshape(1, 1, size, 1) - centres[..., 1].reshape(*centres.shape[:2], 1, 1)) ** 2
    return torch.exp(-(across + down) / (2 * width**2))


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    points, size, count = 2, 12, 600
    centres = 2 + (size - 5) * torch.rand(count + 64, points, 2)
    heat = blobs(centres, size, 1.5)
    sign = torch.tensor([1.0, -1.0]).reshape(1, points, 1, 1)
    images = (sign * heat).sum(1, keepdim=True) + 0.1 * torch.randn(count + 64, 1, size, size)
    return Program(
        model=Hourglass(int(torch.randint(8, 12, ())), points),
        rows=TensorDataset(images[:count], heat[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=1e-3 if mended else 0.1, momentum=0.9),  # guilty
        evaluation=[images[count:], heat[count:]],
        guilty=Guilty("explosion"),
        steps=240,
        batch_size=24,
    )
