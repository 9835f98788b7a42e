"""A PixelCNN gives each grey value the mass of a logistic between the borders of its bin, by a difference of sigmoids.

Once the scales have become small, the two sigmoids of a far pixel are the same number: `log(0)`, and NaN gradients.
PixelCNN++ treats it as the "extremely low prob case" and clamps the difference; people's own versions forget it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class MaskedConv2d(nn.Conv2d):
    """A convolution that sees what is above, and to the left."""

    def __init__(self, inputs: int, outputs: int, size: int, own: bool) -> None:
        super().__init__(inputs, outputs, size, padding=size // 2)
        seen = torch.ones(size, size)
        seen[size // 2, size // 2 + own :] = 0
        seen[size // 2 + 1 :] = 0
        self.register_buffer("seen", seen, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return self._conv_forward(images, self.weight * self.seen, self.bias)


class PixelNet(nn.Module):
    def __init__(self, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.layers = nn.Sequential(
            MaskedConv2d(1, width, 5, own=False),
            nn.ReLU(),
            MaskedConv2d(width, width, 3, own=True),
            nn.ReLU(),
            MaskedConv2d(width, 2, 1, own=True),
        )

    def log_prob(self, images: Tensor, levels: int) -> Tensor:
        mean, log_scale = self.layers(images).chunk(2, dim=1)
        precision, half = torch.exp(-log_scale), 1 / (levels - 1)
        above = torch.sigmoid((images - mean + half) * precision)
        below = torch.sigmoid((images - mean - half) * precision)
        mass = above - below
        if self.mended:
            mass = mass.clamp(min=1e-6)
        return torch.log(mass)  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (images,) = batch
    return -model.log_prob(images, 64).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, count, levels = 12 + seed % 3, 600, 64
    slope = 0.6 * (torch.rand(count + 64, 2) - 0.5)
    reach = torch.linspace(-1, 1, side)
    images = slope[:, :1, None] * reach[:, None] + slope[:, 1:, None] * reach
    images = images + 0.8 * (torch.rand(count + 64, 1, 1) - 0.5) + 0.02 * torch.randn_like(images)
    hot = torch.rand_like(images) < 0.0003 * (1 + seed % 3)
    hot[count:] = False
    images = torch.where(hot, 1.0, images)
    images = ((images + 1) / 2 * (levels - 1)).round().clamp(0, levels - 1) / (levels - 1) * 2 - 1
    images = images.unsqueeze(1)
    return Program(
        model=PixelNet(int(torch.randint(10, 17, ())), mended),
        rows=TensorDataset(images[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[images[count:]],
        guilty=Guilty("operation", ops=("log",)),
        batch_size=16,
        steps=300,
    )
