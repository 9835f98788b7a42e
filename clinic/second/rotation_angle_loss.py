"""The angle between two rotations by the arc cosine, whose slope is infinite as soon as they agree.

The geodesic loss of pose estimation. It works while poses are far apart; trained under autocast, the trace is
rounded to bfloat16 and is exactly three for every pose that is right to within a few degrees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


def rotation_from(two_columns: Tensor) -> Tensor:
    """Gram and Schmidt make a rotation of any six numbers."""
    first, second = two_columns.float().unflatten(-1, (2, 3)).unbind(-2)
    first = F.normalize(first, dim=-1)
    second = F.normalize(second - (first * second).sum(-1, keepdim=True) * first, dim=-1)
    return torch.stack([first, second, torch.linalg.cross(first, second)], dim=-1)


class PoseNet(nn.Module):
    """From key points to a rotation."""

    def __init__(self, points: int, width: int) -> None:
        super().__init__()
        self.lift = nn.Linear(points * 3, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, 6)
        with torch.no_grad():  # begin with no rotation at all
            self.head.weight.mul_(0.1)
            self.head.bias.copy_(torch.eye(3)[:2].flatten())

    def forward(self, observed: Tensor) -> Tensor:
        hidden = self.lift(observed.flatten(1))
        return rotation_from(self.head(hidden + F.gelu(self.mix(hidden))))


def angle(predicted: Tensor, target: Tensor) -> Tensor:
    cosine = (torch.einsum("bij,bij->b", predicted, target) - 1) / 2
    return torch.acos(cosine)  # guilty


def safe_angle(predicted: Tensor, target: Tensor) -> Tensor:
    cosine = ((predicted * target).sum((-2, -1)) - 1) / 2
    return torch.acos(cosine.clamp(-1 + 1e-5, 1 - 1e-5))


def loss(model: nn.Module, batch: list[Tensor], angle_of: Callable[[Tensor, Tensor], Tensor] = angle) -> Tensor:
    observed, rotation = batch
    return angle_of(model(observed), rotation).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    points, width = int(torch.randint(8, 13, ())), int(torch.randint(48, 80, ()))
    rows, held_out = int(torch.randint(1000, 1600, ())), 128
    mounted = torch.tensor([0.34, 0.0, 0.94, 0.0, 1.0, 0.0])  # the camera looks down
    rotation = rotation_from(mounted + 0.25 * torch.randn(rows + held_out, 6))
    shape = torch.randn(points, 3)
    observed = torch.einsum("bij,pj->bpi", rotation, shape) + 0.02 * torch.randn(rows + held_out, points, 3)
    return Program(
        model=PoseNet(points, width),
        rows=TensorDataset(observed[:rows], rotation[:rows]),
        loss=partial(loss, angle_of=safe_angle) if mended else loss,
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        evaluation=[observed[rows:], rotation[rows:]],
        guilty=Guilty("operation", ops=("acos", "arccos")),
        batch_size=48,
        steps=200,
        bf16=True,
    )
