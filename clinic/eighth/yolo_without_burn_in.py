"""A detector with YOLO's boxes, width and height by an exponential, started at the full rate without burn-in.

Darknet warms up over a thousand steps for this reason; the many ports that left it out have threads of the kind "loss
is nan after 3 iterations" (width and height are predicted as `anchor * exp(t)` and compared in pixels).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class BurnIn(torch.optim.SGD):
    """SGD whose rate climbs to its full value by the fourth power over the burn-in, as Darknet does it."""

    def __init__(self, weights: Any, lr: float, momentum: float, burn_in: int) -> None:
        super().__init__(weights, lr=lr, momentum=momentum)
        self.full, self.burn_in, self.count = lr, burn_in, 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = self.full * min(1.0, self.count / self.burn_in) ** 4
        return super().step(closure)


class Detector(nn.Module):
    def __init__(self, channels: int, anchor: float) -> None:
        super().__init__()
        self.anchor = anchor
        self.body = nn.Sequential(
            nn.Conv2d(1, channels, 3, stride=2, padding=1),
            nn.LeakyReLU(0.1),
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
            nn.LeakyReLU(0.1),
            nn.Conv2d(2 * channels, 2 * channels, 3, stride=2, padding=1),
            nn.LeakyReLU(0.1),
        )
        self.head = nn.Conv2d(2 * channels, 5, 3, padding=1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raw = self.head(self.body(images))
        return raw[:, 0], raw[:, 1:3].sigmoid(), self.anchor * raw[:, 3:].exp()


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, cells, offsets, sizes = batch
    score, centre, extent = model(images)
    there = nn.functional.cross_entropy(score.flatten(1), cells)
    place = torch.arange(len(images))
    centre, extent = centre.flatten(2)[place, :, cells], extent.flatten(2)[place, :, cells]
    return there + ((centre - offsets) ** 2).sum(dim=-1).mean() + ((extent - sizes) ** 2).sum(dim=-1).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, count = 24, 700
    sizes = 3 + 9 * torch.rand(count + 96, 2)
    centres = 4 + 16 * torch.rand(count + 96, 2)
    grid = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")) + 0.5
    inside = ((grid - centres[..., None, None]).abs() < sizes[..., None, None] / 2).all(dim=1)
    images = (1.5 * inside + 0.2 * torch.randn(count + 96, side, side)).unsqueeze(1)
    cells = (centres // 8).long()
    tensors = [images, 3 * cells[:, 0] + cells[:, 1], centres / 8 - cells, sizes]
    return Program(
        model=Detector(int(torch.randint(6, 11, ())), anchor=5.0 + seed % 3),
        rows=TensorDataset(*(tensor[:count] for tensor in tensors)),
        loss=loss,
        optimizer=partial(BurnIn, lr=2e-3 if mended else 2e-2, momentum=0.9, burn_in=100 if mended else 1),
        evaluation=[tensor[count:] for tensor in tensors],
        guilty=Guilty("explosion"),
        steps=350,
    )
