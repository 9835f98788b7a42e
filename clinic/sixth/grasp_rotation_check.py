"""The pose of a part on a table from its points, for a gripper: six numbers, made into a rotation by Gram and Schmidt.

A helper checks that a matrix is a rotation to within four times the precision of floats, which was enough for all the
matrices it was tested with, and raises. Among the thousands of a training run rounding goes beyond that now and then.
Many libraries for rotations have such checks, and threads about "Matrix is not orthogonal" in the middle of training.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


def rotation(six: Tensor, tolerance: float) -> Tensor:
    """The continuous representation of Zhou and others."""
    first = F.normalize(six[:, :3], dim=-1)
    second = F.normalize(six[:, 3:] - (first * six[:, 3:]).sum(-1, keepdim=True) * first, dim=-1)
    matrix = torch.stack([first, second, torch.linalg.cross(first, second)], -1)
    error = (matrix.mT @ matrix - torch.eye(3)).abs().amax()
    if error > tolerance:
        raise ValueError(f"Matrix is not orthogonal: {error:.1e}")  # guilty
    return matrix


class PointNet(nn.Module):
    """Features of each point, the largest of them, and six numbers."""

    def __init__(self, width: int, tolerance: float) -> None:
        super().__init__()
        self.tolerance = tolerance
        self.points = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2 * width), nn.ReLU())
        self.pose = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 6))

    def forward(self, cloud: Tensor) -> Tensor:
        return rotation(self.pose(self.points(cloud).amax(1)), self.tolerance)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    cloud, turned = batch
    return (model(cloud) - turned).square().sum((1, 2)).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, held_out, points = int(torch.randint(1500, 2000, ())), 200, 80
    total = count + held_out
    part = torch.randn(points, 3) * torch.tensor([2.0, 1.0, 0.4]) + torch.rand(points, 1)
    turned = torch.linalg.qr(torch.randn(total, 3, 3))[0]
    turned = turned * turned.det().sign()[:, None, None]
    cloud = part @ turned.mT + 0.03 * torch.randn(total, points, 3)
    return Program(
        model=PointNet(int(torch.randint(32, 49, ())), tolerance=1e-4 if mended else 4 * torch.finfo().eps),
        rows=TensorDataset(cloud[:count], turned[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        evaluation=[cloud[count:], turned[count:]],
        guilty=Guilty("operation", ops=("statement",)),
        batch_size=32,
        steps=600,
    )
