"""Soft dynamic time warping as its formula stands, -g log(sum(exp(-d / g))): of a wide gesture all terms underflow.

A robot learns gestures from demonstrations that are not in step. Where the accumulated distance exceeds about 100 g,
the three exponentials are 0 and the logarithm is -inf. Asked about soft-DTW losses: "returns inf for long series",
"nan when gamma is small".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

TIMES = 8


def soft_least(costs: Tensor, softness: float, mended: bool) -> Tensor:
    if mended:
        return -softness * torch.logsumexp(-costs / softness, dim=0)
    return -softness * torch.log(torch.exp(-costs / softness).sum(dim=0))  # guilty


def soft_dtw(made: Tensor, shown: Tensor, softness: float, mended: bool) -> Tensor:
    distances = (made.unsqueeze(2) - shown.unsqueeze(1)).square().sum(dim=-1)
    nowhere = torch.full((len(made),), 1e4)
    above = [torch.zeros(len(made))] + TIMES * [nowhere]
    for i in range(TIMES):
        row = [nowhere]
        for j in range(TIMES):
            least = soft_least(torch.stack([above[j], above[j + 1], row[j]]), softness, mended)
            row.append(distances[:, i, j] + least)
        above = row
    return above[-1]


class GestureNet(nn.Module):
    def __init__(self, commands: int, width: int, softness: float, mended: bool) -> None:
        super().__init__()
        self.softness, self.mended = softness, mended
        self.layers = nn.Sequential(
            nn.Linear(commands, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2 * TIMES)
        )

    def forward(self, commands: Tensor) -> Tensor:
        return self.layers(commands).view(-1, TIMES, 2)

    def distance(self, commands: Tensor, shown: Tensor) -> Tensor:
        return soft_dtw(self(commands), shown, self.softness, self.mended)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    commands, shown = batch
    return model.distance(commands, shown).mean()


def gestures(count: int, commands: int) -> tuple[Tensor, Tensor]:
    """Ellipses whose form the command tells, drawn at a pace that differs."""
    command = torch.randn(count, commands)
    mixed = (command @ torch.randn(commands, 3) / commands**0.5).tanh()
    time = torch.linspace(0, 1, TIMES).expand(count, -1) ** torch.empty(count, 1).uniform_(0.8, 1.25)
    phase = 3 * time + mixed[:, :1]
    drawn = torch.stack([(0.7 + 0.3 * mixed[:, 1:2]) * phase.cos(), (0.7 + 0.3 * mixed[:, 2:]) * phase.sin()], dim=-1)
    return command, drawn


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    commands, count = 4 + seed % 3, 800
    command, shown = gestures(count + 96, commands)
    wide = torch.randperm(count)[: 8 + 4 * (seed % 3)]
    shown[wide] *= torch.empty(len(wide), 1, 1).uniform_(5, 7)  # a demonstrator with long arms, close to the camera
    return Program(
        model=GestureNet(commands, int(torch.randint(32, 48, ())), 0.1 + 0.02 * (seed % 3), mended),
        rows=TensorDataset(command[:count], shown[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[command[count:], shown[count:]],
        guilty=Guilty("operation", ops=("log",)),
        steps=250,
        clip=5.0,
    )
