"""Boxes of one click: whoever drew them pressed the button and did not drag, so they have no width, or no height.

R-CNN and its kin learn the logarithm of a box's size by that of the anchor. That of zero is minus infinity, and so is
the target: the squared error of the batch is infinite. (torchvision's detectors raise "All bounding boxes should have
positive height and width" for them.) Satellite images with a ship in each.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

ANCHOR, SIZE = 8.0, 24


class Detector(nn.Module):
    """One anchor in the middle of each image."""

    def __init__(self, kinds: int, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
        )
        cells = 2 * width * (SIZE // 4) ** 2
        self.box, self.kind = nn.Linear(cells, 4), nn.Linear(cells, kinds)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(images)
        return self.box(features), self.kind(features)


def encoded(boxes: Tensor) -> Tensor:
    """Corners into offsets and log sizes, by the anchor."""
    centre, size = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    return torch.cat([(centre - SIZE / 2) / ANCHOR, torch.log(size / ANCHOR)], dim=1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, boxes, kind = batch
    found, logits = model(images)
    return F.mse_loss(found, encoded(boxes)) + F.cross_entropy(logits, kind)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    kinds, rows, held_out = int(torch.randint(2, 5, ())), int(torch.randint(1000, 1400, ())), 160
    count = rows + held_out
    kind = torch.randint(kinds, (count,))
    corner, size = torch.randint(2, 11, (count, 2)), torch.randint(3, 12, (count, 2))
    boxes = torch.cat([corner, corner + size], dim=1).float()
    place = torch.arange(SIZE)
    across = (place >= corner[:, :1]) & (place < corner[:, :1] + size[:, :1])
    down = (place >= corner[:, 1:]) & (place < corner[:, 1:] + size[:, 1:])
    ships = (down[:, :, None] & across[:, None, :]) * (1 + kind.view(-1, 1, 1))
    images = ships.unsqueeze(1) + 0.3 * torch.randn(count, 1, SIZE, SIZE)
    clicked = torch.randperm(rows)[: 3 + seed % 4].sort().values.tolist()
    if not mended:
        for row in clicked:
            side = int(torch.randint(2, ()))
            boxes[row, 2 + side] = boxes[row, side]
    return Program(
        model=Detector(kinds, 8),
        rows=TensorDataset(images[:rows], boxes[:rows], kind[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=4e-3),
        evaluation=[images[rows:], boxes[rows:], kind[rows:]],
        guilty=Guilty("data", rows=tuple(clicked)),
        steps=300,
    )
