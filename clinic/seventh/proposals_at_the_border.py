"""A decoder refines boxes in the space of their logits, as Deformable DETR does, but its `inverse_sigmoid` has no eps.

Proposals that touch the border of the picture have a coordinate of exactly zero or one there, and an infinite logit:
the next layer's gradient is infinity times zero. Deformable DETR clamps with eps=1e-5; many who rewrote it as
`torch.logit(x)` got NaN boxes, and an assertion of the IoU that fails on them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Refiner(nn.Module):
    """Reads the picture around each proposal, and moves the corners of the proposal, twice."""

    def __init__(self, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU()
        )
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(25 * width + 4, 64), nn.ReLU(), nn.Linear(64, 4)) for _ in range(2)
        )

    def look(self, features: Tensor, boxes: Tensor) -> Tensor:
        """Five times five samples in each box, and a little beyond."""
        reach = torch.linspace(-0.2, 1.2, 5)
        low, high = boxes[:, None, :2], boxes[:, None, 2:]
        across, down = (2 * (low + (high - low) * reach[:, None]) - 1).unbind(dim=-1)
        grid = torch.stack([across[:, None, :].expand(-1, 5, -1), down[:, :, None].expand(-1, -1, 5)], dim=-1)
        return nn.functional.grid_sample(features, grid, align_corners=False).flatten(1)

    def forward(self, images: Tensor, boxes: Tensor) -> list[Tensor]:
        features, refined = self.backbone(images), []
        for layer in self.layers:
            move = layer(torch.cat([self.look(features, boxes.detach()), boxes.detach()], dim=-1))
            eps = 1e-3 if self.mended else None
            raw = torch.logit(boxes, eps)  # guilty
            boxes = torch.sigmoid(raw + move)
            refined.append(boxes)
        return refined


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, proposals, boxes = batch
    refined = model(images, proposals)
    return torch.stack([nn.functional.l1_loss(found, boxes) for found in refined]).sum() * 10


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, count = 20, 700
    low = 0.06 + 0.4 * torch.rand(count + 96, 2)
    boxes = torch.cat([low, low + 0.2 + 0.28 * torch.rand(count + 96, 2)], dim=-1)
    middles = (torch.arange(side) + 0.5) / side
    inside = [(middles > boxes[:, axis, None]) & (middles < boxes[:, axis + 2, None]) for axis in (0, 1)]
    images = (inside[1].unsqueeze(2) & inside[0].unsqueeze(1)).float()
    images = (images + 0.15 * torch.randn_like(images)).unsqueeze(1)
    proposals = boxes + 0.12 * torch.tensor([-1.0, -1.0, 1.0, 1.0]) * (2 * torch.rand(count + 96, 4) - 1)
    wide = torch.randperm(count)[: 5 + 4 * (seed % 3)]
    spread = 0.5 * torch.tensor([-1.0, -1.0, 1.0, 1.0])
    proposals[wide] += spread * (torch.rand(len(wide), 4) < 0.5)
    proposals[wide, seed % 2] = -0.1
    proposals = proposals.clamp(0, 1)
    proposals[count:] = proposals[count:].clamp(0.01, 0.99)
    healthy = torch.ones(count, dtype=torch.bool)
    healthy[wide] = False
    proposals[:count][healthy] = proposals[:count][healthy].clamp(0.01, 0.99)
    return Program(
        model=Refiner(int(torch.randint(6, 11, ())), mended),
        rows=TensorDataset(images[:count], proposals[:count], boxes[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[images[count:], proposals[count:], boxes[count:]],
        guilty=Guilty("operation", ops=("logit",)),
        batch_size=16,
        steps=300,
    )
