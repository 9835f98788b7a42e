"""Masks of cells from two tools: one writes 0 and 1, the other 0 and 255, and a few files of the second came along.

`binary_cross_entropy_with_logits` takes any target. For a target of 255 it has no lower bound, so that the loss goes
far below zero and the net says "cell" everywhere. Found daily in questions about a U-Net with a negative loss.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class UNet(nn.Module):
    """One way down and one way up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, width, 3, padding=1)
        self.deep = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.out = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, picture: Tensor) -> Tensor:
        down = F.relu(self.down(picture))
        deep = F.relu(self.deep(F.max_pool2d(down, 2)))
        return self.out(torch.cat([down, F.relu(self.up(deep))], 1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    picture, mask = batch
    return F.binary_cross_entropy_with_logits(model(picture), mask)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    size, count, held_out = 16, int(torch.randint(400, 600, ())), 64
    total = count + held_out
    middle, radius = torch.empty(total, 2, 1, 1).uniform_(4, 12), torch.empty(total, 1, 1).uniform_(2, 4)
    grid = torch.arange(size)
    mask = ((grid[:, None] - middle[:, 0]) ** 2 + (grid[None] - middle[:, 1]) ** 2 < radius**2).float().unsqueeze(1)
    picture = 0.9 * mask + 0.5 * torch.randn(total, 1, size, size)
    other = sorted(torch.randperm(count)[: count // 50].tolist())
    if not mended:
        mask[other] *= 255
    return Program(
        model=UNet(int(torch.randint(8, 13, ()))),
        rows=TensorDataset(picture[:count], mask[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[picture[count:], mask[count:]],
        guilty=Guilty("data", rows=tuple(other)),
        batch_size=16,
        steps=300,
    )
