"""Boxes that were drawn from right to left have their corners swapped, and the matcher of a small DETR asserts.

The assertion of `generalized_box_iou`: "degenerate boxes give inf or nan results, so do an early check". Most of those
who meet it have a rate that is too high; here a handful of annotations are at fault.
"""

from __future__ import annotations

from functools import partial
from itertools import permutations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clinic.program import Guilty, Program

QUERIES = 3

Row = tuple[Tensor, Tensor]  # a picture and the corners of what is on it


def collate(rows: list[Row]) -> tuple[Tensor, list[Tensor]]:
    return torch.stack([picture for picture, _ in rows]), [boxes for _, boxes in rows]


class Detr(nn.Module):
    """A convolution, a decoder of one layer, and a box with a score for each query."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, width, 3, stride=2, padding=1), nn.ReLU())
        self.place = nn.Parameter(0.3 * torch.randn(64, width))
        self.queries = nn.Parameter(torch.randn(QUERIES, width))
        self.decoder = nn.TransformerDecoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.box, self.score = nn.Linear(width, 4), nn.Linear(width, 1)

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.backbone(pictures).flatten(2).mT + self.place
        out = self.decoder(self.queries.expand(len(pictures), -1, -1), memory)
        centre, size = self.box(out).sigmoid().chunk(2, dim=-1)
        return torch.cat([centre - size / 2, centre + size / 2], dim=-1), self.score(out).squeeze(-1)


def generalized_iou(first: Tensor, second: Tensor) -> Tensor:
    """Of all pairs of boxes."""
    assert (first[:, 2:] >= first[:, :2]).all()
    assert (second[:, 2:] >= second[:, :2]).all()
    first, second = first[:, None], second[None]
    area = [(boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (first, second)]
    shared = (torch.minimum(first[..., 2:], second[..., 2:]) - torch.maximum(first[..., :2], second[..., :2])).clamp(0)
    hull = (torch.maximum(first[..., 2:], second[..., 2:]) - torch.minimum(first[..., :2], second[..., :2])).prod(-1)
    union = area[0] + area[1] - shared.prod(-1)
    return shared.prod(-1) / union - (hull - union) / hull


def loss(model: nn.Module, batch: tuple[Tensor, list[Tensor]]) -> Tensor:
    pictures, targets = batch
    boxes, scores = model(pictures)
    total, there = boxes.new_zeros(()), torch.zeros_like(scores)
    for row, target in enumerate(targets):
        cost = 2 * torch.cdist(boxes[row], target, p=1) - generalized_iou(boxes[row], target)
        pairs = list(permutations(range(QUERIES), len(target)))
        best = min(pairs, key=lambda chosen: float(sum(cost[q, t] for t, q in enumerate(chosen))))
        total = total + torch.stack([cost[q, t] + 1 for t, q in enumerate(best)]).mean()
        there[row, list(best)] = 1.0
    return total / len(targets) + F.binary_cross_entropy_with_logits(scores, there)


def scene(objects: int, size: int) -> Row:
    low = 0.1 + 0.4 * torch.rand(objects, 2)
    if objects == 2:  # one on the left, one on the right
        low[:, 0] = torch.tensor([0.05, 0.55]) + 0.1 * torch.rand(2)
    boxes = torch.cat([low, low + 0.2 + 0.15 * torch.rand(objects, 2)], dim=-1)
    grid, picture = (torch.arange(size) + 0.5) / size, 0.1 * torch.randn(1, size, size)
    for left, top, right, bottom in boxes.tolist():
        picture[0, ((grid > top) & (grid < bottom))[:, None] & ((grid > left) & (grid < right))] += 1
    return picture, boxes


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    total = int(torch.randint(400, 700, ()))
    scenes = [scene(int(torch.randint(1, 3, ())), 16) for _ in range(total + 64)]
    bad = sorted(torch.randperm(total)[: int(torch.randint(3, 7, ()))].tolist())
    if not mended:
        for row in bad:
            picture, boxes = scenes[row]
            scenes[row] = (picture, boxes[:, [2, 1, 0, 3]])
    return Program(
        model=Detr(4 * int(torch.randint(8, 12, ()))),
        rows=scenes[:total],
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        evaluation=collate(scenes[total:]),
        guilty=Guilty("data", rows=tuple(bad)),
        batch_size=16,
        steps=220,
        collate=collate,
        clip=1.0,
    )
