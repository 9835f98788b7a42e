"""Adam with an epsilon of one, as the manual of TensorFlow names for Inception, at the usual rate of a thousandth.

Gradients of a board game's small inception net are far below one, so each update is a thousandth of the gradient: the
loss hardly moves. "When training an Inception network on ImageNet a current good choice is 1.0 or 0.1", and people
copy the epsilon without the rate; met as "Adam does not learn, SGD does".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

SIDE = 7


class Inception(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.point = nn.Conv2d(inputs, width, 1)
        self.near = nn.Sequential(nn.Conv2d(inputs, width, 1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
        self.far = nn.Sequential(nn.Conv2d(inputs, width, 1), nn.ReLU(), nn.Conv2d(width, width, 5, padding=2))

    def forward(self, boards: Tensor) -> Tensor:
        return torch.cat([self.point(boards), self.near(boards), self.far(boards)], dim=1).relu()


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    boards, winners = batch
    return nn.functional.cross_entropy(model(boards), winners)


def positions(count: int, stones: float) -> tuple[Tensor, Tensor]:
    """Stones of both sides; who has more pairs of neighbours is ahead, and else it is a draw."""
    drawn = torch.rand(count, SIDE, SIDE)
    mine, theirs = (drawn < stones).float(), (drawn > 1 - stones).float()

    def pairs(side: Tensor) -> Tensor:
        across, down = side[:, 1:] * side[:, :-1], side[:, :, 1:] * side[:, :, :-1]
        return across.sum(dim=(1, 2)) + down.sum(dim=(1, 2))

    ahead = pairs(mine) - pairs(theirs)
    return torch.stack([mine, theirs], dim=1), (ahead > 1).long() + 2 * (ahead < -1).long()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    width, count = 6 + 2 * (seed % 3), 1500
    boards, winners = positions(count + 128, 0.3 + 0.03 * (seed % 3))
    return Program(
        model=nn.Sequential(
            Inception(2, width), Inception(3 * width, width), nn.AvgPool2d(SIDE), nn.Flatten(), nn.Linear(3 * width, 3)
        ),
        rows=TensorDataset(boards[:count], winners[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3 if mended else 1e-3, eps=1e-8 if mended else 1.0),
        evaluation=[boards[count:], winners[count:]],
        guilty=Guilty("optimizer"),
        steps=400,
    )
