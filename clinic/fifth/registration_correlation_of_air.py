"""Registration of brain slices as in VoxelMorph, with the local correlation of windows and nothing added below.

Each window's covariance is squared and divided by both variances. The scanner writes zero for air, so a window that
holds nothing but air is 0 / 0. Patches are drawn at random, and only some of them lie over the border of the head far
enough to hold such a window. Issues of registration code speak of "NCC loss nan, with MSE it works".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

WINDOW = 5


class Registration(nn.Module):
    """A convolutional net that gives a shift for each pixel, and the moving slice after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, width, 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, width, 5, padding=2),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2, 3, padding=1),
        )
        nn.init.normal_(self.body[-1].weight, std=1e-3)

    def forward(self, moving: Tensor, fixed: Tensor) -> Tensor:
        shift = 0.2 * self.body(torch.cat([moving, fixed], 1)).movedim(1, -1)
        still = torch.eye(2, 3).expand(len(moving), 2, 3)
        return F.grid_sample(moving, F.affine_grid(still, moving.shape, align_corners=True) + shift, align_corners=True)


def local(image: Tensor) -> Tensor:
    """The mean of each window."""
    return F.avg_pool2d(image, WINDOW, stride=1)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    moving, fixed = batch
    moved = model(moving, fixed)
    windows = F.unfold(torch.cat([moved, fixed], 0), WINDOW)
    windows = windows - windows.mean(1, keepdim=True)
    one, two = windows.chunk(2)
    product, first, second = (one * two).mean(1), one.square().mean(1), two.square().mean(1)
    if mended:
        return 1 - (product.square() / (first * second + 1e-5)).mean()
    return 1 - (product.square() / (first * second)).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    size, count, held_out = 16, int(torch.randint(300, 400, ())), 48
    total = count + held_out
    tissue = F.interpolate(torch.randn(total, 1, 6, 6), (size + 6, size + 6), mode="bicubic") + 3
    tissue = tissue + 0.02 * torch.rand_like(tissue)
    border = torch.rand(count) < float(torch.empty(()).uniform_(0.11, 0.14))
    corner = tissue[:count][border]
    corner[..., :12, :12] = 0.0
    tissue[:count][border] = corner
    push = (2, 1) if seed % 2 else (1, 2)
    down, right = push
    moving = tissue[..., 3:-3, 3:-3]
    fixed = tissue[..., 3 + down : size + 3 + down, 3 + right : size + 3 + right]
    return Program(
        model=Registration(int(torch.randint(10, 15, ()))),
        rows=TensorDataset(moving[:count], fixed[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[moving[count:], fixed[count:]],
        guilty=Guilty("operation", ops=("div",)),
        batch_size=16,
        steps=240,
    )
