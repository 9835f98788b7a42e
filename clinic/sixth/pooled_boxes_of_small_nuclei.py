"""Is a nucleus dividing: a small residual network, and the largest feature inside of the box around the nucleus.

Boxes are rounded to the grid of the feature map, which is four times as coarse as the picture. A fragment of a dead
cell is three pixels wide, both its sides may round to the same line, and the largest value of nothing is an error.
Everyone who writes RoI pooling by slicing meets it sooner or later; detection libraries take floor and ceiling.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

SIZE, STRIDE = 32, 4


class Residual(nn.Module):
    """Two convolutions with norms, beside a way around them."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.around = nn.Conv2d(inside, outside, 1, stride=2, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outside) for _ in range(2))

    def forward(self, state: Tensor) -> Tensor:
        deep = self.norms[1](self.second(F.relu(self.norms[0](self.first(state)))))
        return F.relu(deep + self.around(state))


class Nuclei(nn.Module):
    """Features of the whole picture, pooled inside of the box."""

    def __init__(self, width: int, outward: bool) -> None:
        super().__init__()
        self.outward = outward
        self.features = nn.Sequential(Residual(1, width), Residual(width, 2 * width))
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, picture: Tensor, box: Tensor) -> Tensor:
        pooled = []
        for feature, corners in zip(self.features(picture), box / STRIDE, strict=True):
            if self.outward:
                corners = torch.cat([corners[:2].floor(), corners[2:].ceil()])
            top, left, bottom, right = corners.round().int().tolist()
            pooled.append(feature[:, top:bottom, left:right].amax((1, 2)))  # guilty
        return self.head(torch.stack(pooled))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    picture, box, divides = batch
    return F.cross_entropy(model(picture, box), divides)


def nuclei(count: int, fragments: float) -> tuple[Tensor, Tensor, Tensor]:
    """One nucleus in its box and another outside of it. Those that divide have a dark band through the middle."""
    divides = torch.randint(2, (count, 2))
    half = torch.empty(count, 2).uniform_(3.5, 6)
    half[:, 0] = torch.where(torch.rand(count) < fragments, 1.5, half[:, 0])
    middle = torch.stack([torch.empty(count, 2).uniform_(7, 25), torch.tensor([[7.0, 25.0]]).expand(count, 2)], -1)
    grid = torch.arange(SIZE) + 0.5
    away = (grid[:, None] - middle[..., 0, None, None]), (grid - middle[..., 1, None, None])
    inside = (away[0].square() + away[1].square() < half[..., None, None].square()).float()
    band = (away[0].abs() < 1.2) & (divides == 1)[..., None, None]
    picture = (inside * (1 - 0.8 * band.float())).sum(1, keepdim=True) + 0.25 * torch.randn(count, 1, SIZE, SIZE)
    box = torch.cat([middle[:, 0] - half[:, :1], middle[:, 0] + half[:, :1]], -1)
    return picture, box, divides[:, 0]


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    return Program(
        model=Nuclei(int(torch.randint(10, 17, ())), outward=mended),
        rows=TensorDataset(*nuclei(int(torch.randint(700, 1000, ())), 0.015)),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.03, momentum=0.9, nesterov=True),
        evaluation=list(nuclei(200, 0.0)),
        guilty=Guilty("operation", ops=("amax",)),
        batch_size=16,
        steps=360,
    )
