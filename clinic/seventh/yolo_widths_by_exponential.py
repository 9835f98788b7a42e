"""A one-stage detector takes the exponential of raw widths and heights and has no warm-up: the boxes blow up at once.

"Loss is NaN after ten iterations" is the first thing that many people see of a YOLO of their own, and the answers on
forums say: the sides are an exponential and the loss counts squared pixels, so begin with a far smaller rate.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Detector(nn.Module):
    """A grid of cells, each with an objectness, a centre within the cell, and the sides as multiples of an anchor."""

    def __init__(self, width: int, anchor: float) -> None:
        super().__init__()
        self.anchor = anchor
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1),
            nn.LeakyReLU(0.1),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.LeakyReLU(0.1),
            nn.Conv2d(2 * width, 2 * width, 3, 2, 1),
            nn.LeakyReLU(0.1),
            nn.Conv2d(2 * width, 5, 3, 1, 1),
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raw = self.backbone(images).flatten(2)
        return raw[:, 0], raw[:, 1:3].sigmoid(), self.anchor * raw[:, 3:].exp()


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, cells, offsets, sides = batch
    objectness, centres, sizes = model(images)
    mine = cells[:, None, None].expand(-1, 2, 1)
    there = nn.functional.one_hot(cells, objectness.shape[-1]).float()
    presence = nn.functional.binary_cross_entropy_with_logits(objectness, there, reduction="none").sum(dim=-1)
    centre = (centres.gather(2, mine).squeeze(-1) - offsets).square().sum(dim=-1)
    side = (sizes.gather(2, mine).squeeze(-1) - sides).square().sum(dim=-1)
    return (presence + 5.0 * (centre + side)).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, count = 24, 800
    centres = 3 + (side - 6) * torch.rand(count + 96, 2)
    sides = 4 + (8 + seed % 3) * torch.rand(count + 96, 2)
    reach = torch.arange(side)
    inside = [(reach - centres[:, axis, None]).abs() < sides[:, axis, None] / 2 for axis in (0, 1)]
    images = (inside[1].unsqueeze(2) & inside[0].unsqueeze(1)).float()
    images = (images + 0.1 * torch.randn_like(images)).unsqueeze(1)
    column, line = (centres / 8).long().unbind(dim=-1)
    cells, offsets = 3 * line + column, (centres / 8).frac()
    rows = images, cells, offsets, sides
    return Program(
        model=Detector(int(torch.randint(8, 13, ())), 4.0),
        rows=TensorDataset(*(column[:count] for column in rows)),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=1e-4 if mended else 0.01 + 0.005 * (seed % 2), momentum=0.9),
        evaluation=[column[count:] for column in rows],
        guilty=Guilty("explosion"),
        steps=300,
    )
