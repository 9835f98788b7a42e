"""Rays of pixels by the inverse of a camera's matrix; a few views were never calibrated, and their matrix is all zeros.

"linalg.inv: (Batch element 0): The diagonal element 1 is zero, the inversion could not be completed because the
input matrix is singular": asked about radiance fields and bird's-eye views, where a view without calibration is
written with zeros. One such view is enough for the whole batch.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class BearingNet(nn.Module):
    """Where on the ground the objects at some pixels are, and how bright, from the pixels' rays and a height."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )

    def forward(self, intrinsics: Tensor, pixels: Tensor, height: Tensor) -> Tensor:
        homogeneous = torch.cat([pixels, torch.ones_like(pixels[..., :1])], dim=-1)
        rays = homogeneous @ torch.linalg.inv(intrinsics).transpose(-1, -2)
        features = torch.cat([rays, height.view(-1, 1, 1).expand_as(rays[..., :1])], dim=-1)
        return self.layers(features)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    intrinsics, pixels, height, place = batch
    return nn.functional.mse_loss(model(intrinsics, pixels, height), place)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    views, held_out, points = int(torch.randint(700, 1000, ())), 128, 12
    every, size = views + held_out, float(torch.randint(400, 900, ()))
    intrinsics = torch.zeros(every, 3, 3)
    intrinsics[:, 0, 0] = intrinsics[:, 1, 1] = size * (0.8 + 0.6 * torch.rand(every))
    intrinsics[:, :2, 2] = size / 2 + 10 * torch.randn(every, 2)
    intrinsics[:, 2, 2] = 1.0
    pixels = size * torch.rand(every, points, 2)
    height = 1 + torch.rand(every)
    rays = torch.cat([pixels, torch.ones(every, points, 1)], dim=-1) @ torch.linalg.inv(intrinsics).transpose(-1, -2)
    distance = height.view(-1, 1) / (0.9 + 0.5 * rays[..., 1])
    place = torch.stack([distance, distance * rays[..., 0]], dim=-1) + 0.03 * torch.randn(every, points, 2)
    never = torch.randperm(views)[: 3 + seed % 4].sort().values
    nominal = torch.tensor([[1.1 * size, 0, size / 2], [0, 1.1 * size, size / 2], [0, 0, 1]])
    intrinsics[never] = nominal if mended else 0.0
    return Program(
        model=BearingNet(int(torch.randint(24, 48, ()))),
        rows=TensorDataset(intrinsics[:views], pixels[:views], height[:views], place[:views]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[intrinsics[views:], pixels[views:], height[views:], place[views:]],
        guilty=Guilty("data", rows=tuple(never.tolist())),
    )
