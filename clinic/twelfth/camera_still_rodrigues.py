"""Rodrigues' formula divides by the angle: where nothing has moved the angle is 0, and so is what it divides.

Met in every hand-written `so3_exp` ("axis-angle to rotation matrix gives nan for zero rotation", pytorch3d, kornia,
smplx issues). Pairs of frames in which the camera stood still are as right as any other.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Turn(nn.Module):
    """From the flow of markers to a rotation vector; no flow is no rotation, hence no biases."""

    def __init__(self, markers: int, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.body = nn.Sequential(nn.Linear(3 * markers, width, bias=False), nn.Tanh())
        self.head = nn.Linear(width, 3, bias=False)

    def forward(self, flow: Tensor, points: Tensor) -> Tensor:
        vector = self.head(self.body(flow.flatten(1)))
        angle = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
        below = angle.clamp(min=1e-6) if self.mended else angle
        axis = vector / below  # guilty
        return rotate(points, axis, angle)


def rotate(points: Tensor, axis: Tensor, angle: Tensor) -> Tensor:
    """Points about an axis, one of each for each row."""
    axes = axis.unsqueeze(1).expand_as(points)
    sine, cosine = angle.sin().unsqueeze(-1), angle.cos().unsqueeze(-1)
    along = (axes * points).sum(-1, keepdim=True) * axes
    return cosine * points + sine * torch.linalg.cross(axes, points) + (1 - cosine) * along


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    flow, before, after = batch
    return nn.functional.mse_loss(model(flow, before), after)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    markers, count = 6 + seed % 4, 800
    places = torch.randn(1, markers, 3)
    vectors = 0.7 * torch.randn(count + 64, 3)
    angle = vectors.norm(dim=-1, keepdim=True)
    before = places.expand(count + 64, -1, -1) + 0.1 * torch.randn(count + 64, markers, 3)
    after = rotate(before, vectors / angle, angle) + 0.02 * torch.randn(count + 64, markers, 3)
    still = torch.randperm(count)[: count // 10]
    after[still] = before[still]
    flow = after - before
    return Program(
        model=Turn(markers, int(torch.randint(24, 40, ())), mended),
        rows=TensorDataset(flow[:count], before[:count], after[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[flow[count:], before[count:], after[count:]],
        guilty=Guilty("operation", ops=("div",)),
        steps=260,
    )
