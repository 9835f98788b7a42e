"""Boxes of cars by the complete IoU, which compares atan(w / h) of two boxes: without a height that has no slope.

Sizes go through a ReLU, "since lengths are not negative", and of a car far away the height is soon exactly zero. The
loss is finite, since atan(inf) is a right angle; on the way back it is 0 times infinity. Ultralytics adds an eps to the
height, and early ports of CIoU have the issue "loss_ciou becomes nan after some iterations".
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

SIDE = 16


class Finder(nn.Module):
    """The middle of the only car, its width and its height, in shares of the picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Linear(width, 4)
        nn.init.constant_(self.head.bias, 0.2)

    def forward(self, images: Tensor) -> Tensor:
        told = self.head(torch.relu(self.body(images)))
        return torch.cat([told[:, :2].sigmoid(), told[:, 2:].relu()], dim=-1)


def complete_iou(box: Tensor, truth: Tensor, least: float) -> Tensor:
    (x, y, w, h), (tx, ty, tw, th) = box.unbind(-1), truth.unbind(-1)
    left, right = torch.maximum(x - w / 2, tx - tw / 2), torch.minimum(x + w / 2, tx + tw / 2)
    top, bottom = torch.maximum(y - h / 2, ty - th / 2), torch.minimum(y + h / 2, ty + th / 2)
    shared = (right - left).relu() * (bottom - top).relu()
    overlap = shared / (w * h + tw * th - shared + 1e-7)
    across = torch.maximum(x + w / 2, tx + tw / 2) - torch.minimum(x - w / 2, tx - tw / 2)
    down = torch.maximum(y + h / 2, ty + th / 2) - torch.minimum(y - h / 2, ty - th / 2)
    apart = ((x - tx) ** 2 + (y - ty) ** 2) / (across**2 + down**2 + 1e-7)
    shape = torch.atan(w / (h + least))  # guilty
    v = 4 / math.pi**2 * (torch.atan(tw / th) - shape) ** 2
    with torch.no_grad():
        alpha = v / (1 - overlap + v + 1e-7)
    return overlap - apart - alpha * v


def loss(model: nn.Module, batch: list[Tensor], *, least: float) -> Tensor:
    images, boxes = batch
    return (1 - complete_iou(model(images), boxes, least)).mean()


def streets(count: int) -> tuple[Tensor, Tensor]:
    """A bright box on noise; most are near, some far away."""
    far = torch.rand(count) < 0.4
    wide = torch.where(far, 0.1 + 0.06 * torch.rand(count), 0.3 + 0.3 * torch.rand(count))
    high = wide * (0.3 + 0.4 * torch.rand(count))
    x, y = wide / 2 + (1 - wide) * torch.rand(count), high / 2 + (1 - high) * torch.rand(count)
    boxes = torch.stack([x, y, wide, high], dim=-1)
    place = (torch.arange(SIDE) + 0.5) / SIDE
    inside = torch.sigmoid(
        60 * (high / 2).reshape(-1, 1, 1) - 60 * (place.reshape(1, -1, 1) - y.reshape(-1, 1, 1)).abs()
    )
    inside = inside * torch.sigmoid(60 * (wide / 2 - (place.reshape(-1, 1) - x).abs()).T.unsqueeze(1))
    return 2 * inside + 0.15 * torch.randn(count, SIDE, SIDE), boxes


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count = 1000
    images, boxes = streets(count + 96)
    return Program(
        model=Finder(128 + 16 * (seed % 3)),
        rows=TensorDataset(images[:count], boxes[:count]),
        loss=partial(loss, least=1e-3 if mended else 0.0),
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[images[count:], boxes[count:]],
        guilty=Guilty("operation", ops=("div", "truediv", "true_divide", "atan", "arctan")),
        steps=1200,
    )
