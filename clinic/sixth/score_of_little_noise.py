"""A generative model of spiral galaxies' arms by their score, at ten strengths of noise, by SGD.

The target is the noise over its strength, and the squared error was left as it is. At the least noise, 0.01, it is a
million times what it is at the most, and a rate that suits one is far beyond what the other bears: infinite within a
few updates. The paper weighs each strength by its square, which is easily taken for a matter of taste.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Score(nn.Module):
    """The slope of the logarithm of the density at a point, for a strength of noise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.last = nn.Linear(width, 2)

    def forward(self, point: Tensor, strength: Tensor) -> Tensor:
        state = self.first(torch.cat([point, strength.log() / 2], -1))
        for layer in self.layers:
            state = state + layer(nn.functional.silu(state))
        return self.last(nn.functional.silu(state)) / strength


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    point, strength, noise = batch
    error = model(point + strength * noise, strength) + noise / strength
    if mended:
        error = error * strength
    return error.square().sum(-1).mean()


def stars(count: int, turns: float) -> list[Tensor]:
    """Points along two arms, a strength of noise for each, and the noise."""
    along = torch.rand(count, 1).sqrt()
    angle = 2 * torch.pi * turns * along + torch.pi * torch.randint(2, (count, 1))
    point = 1.5 * along * torch.cat([angle.cos(), angle.sin()], -1) + 0.01 * torch.randn(count, 2)
    strength = 10 ** (-2 + 3 * torch.randint(10, (count, 1)) / 9)
    return [point, strength, torch.randn(count, 2)]


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    turns = float(torch.empty(()).uniform_(0.5, 0.8))
    data, held_out = stars(int(torch.randint(8000, 12000, ())), turns), stars(1500, turns)
    return Program(
        model=Score(int(torch.randint(128, 193, ()))),
        rows=TensorDataset(*data),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.SGD, lr=4e-3, momentum=0.9),
        evaluation=held_out,
        guilty=Guilty("explosion"),
        batch_size=256,
        steps=600,
    )
