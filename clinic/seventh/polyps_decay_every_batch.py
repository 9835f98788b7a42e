"""`scheduler.step()` stands inside the loop over batches: a decay that was meant for each epoch comes at every update.

A U-Net segments polyps. The rate is a thousandth after a few dozen updates, and the loss stops where it happens to be:
no error, no NaN. Among the commonest answers to "my loss stops decreasing after the first epoch".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

SIDE = 16


class ScheduledAdam(torch.optim.Adam):
    """Adam, and the exponential decay that is advanced every so many updates."""

    def __init__(self, weights: Any, lr: float, gamma: float, every: int) -> None:
        super().__init__(weights, lr=lr)
        self.gamma, self.every, self.done = gamma, every, 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        value = super().step(closure)
        self.done += 1
        if self.done % self.every == 0:
            for group in self.param_groups:
                group["lr"] *= self.gamma  # guilty
        return value


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fine, self.coarse = block(3, width), block(width, 2 * width)
        self.bottom = block(2 * width, 2 * width)
        self.up, self.merged = nn.Upsample(scale_factor=2), block(3 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.fine(images)
        coarse = self.bottom(self.coarse(nn.functional.max_pool2d(fine, 2)))
        return self.head(self.merged(torch.cat([fine, self.up(coarse)], dim=1))).squeeze(1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, masks = batch
    return nn.functional.binary_cross_entropy_with_logits(model(images), masks)


def endoscopies(count: int) -> tuple[Tensor, Tensor]:
    """Discs that are a little redder than the wall around them, which is darker away from the lamp."""
    centres, radii = torch.rand(count, 2, 1, 1) * SIDE, torch.empty(count, 1, 1).uniform_(2, 5)
    across, down = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    distances = ((across - centres[:, 0]).square() + (down - centres[:, 1]).square()).sqrt()
    masks = (distances < radii).float()
    light = torch.rand(count, 1, 1, 1) - 0.05 * (across + down)
    images = light + 0.5 * torch.randn(count, 3, SIDE, SIDE)
    images[:, 0] += masks
    images[:, 2] -= 0.5 * masks
    return images, masks


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, batch_size = 600, 16
    images, masks = endoscopies(count + 64)
    every = count // batch_size if mended else 1
    return Program(
        model=UNet(8 + 2 * (seed % 3)),
        rows=TensorDataset(images[:count], masks[:count]),
        loss=loss,
        optimizer=partial(ScheduledAdam, lr=2e-3, gamma=0.8 + 0.03 * (seed % 3), every=every),
        evaluation=[images[count:], masks[count:]],
        guilty=Guilty("optimizer"),
        batch_size=batch_size,
        steps=300,
    )
