"""Soft dynamic time warping with its soft minimum by exponentials: far-away paths underflow, and log(0) is the minimum.

In many hand-written versions of soft-DTW (Cuturi & Blondel); reported as "loss is inf for some sequences, smaller gamma
makes it worse". Here wide gestures cost more than a hundred gammas as long as the model has not learned them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Tracker(nn.Module):
    def __init__(self, sensors: int, width: int, gamma: float, mended: bool) -> None:
        super().__init__()
        self.gamma, self.mended = gamma, mended
        self.body = nn.GRU(sensors, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, signals: Tensor) -> Tensor:
        return self.head(self.body(signals)[0])

    def soft_minimum(self, costs: Tensor) -> Tensor:
        if self.mended:
            return -self.gamma * torch.logsumexp(-costs / self.gamma, dim=0)
        total = torch.exp(-costs / self.gamma).sum(dim=0)
        return -self.gamma * torch.log(total)  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    signals, paths = batch
    steps = paths.shape[1]
    apart = ((model(signals).unsqueeze(2) - paths.unsqueeze(1)) ** 2).sum(dim=-1)
    best: dict[tuple[int, int], Tensor] = {}
    for i in range(steps):
        for j in range(steps):
            before = [best[k] for k in ((i - 1, j), (i, j - 1), (i - 1, j - 1)) if k in best]
            best[i, j] = apart[:, i, j] + (model.soft_minimum(torch.stack(before)) if before else 0)
    return best[steps - 1, steps - 1].mean() / steps


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    sensors, steps, count = 4 + seed % 3, 7, 700
    size = 1 + 0.3 * torch.randn(count + 96, 1, 1)
    wide = torch.randperm(count)[: 6 + 2 * (seed % 3)]
    size[wide] = 5 + torch.rand(len(wide), 1, 1)
    turn = 6.28 * torch.rand(count + 96, 1) + 0.5 * torch.arange(steps)
    paths = size * torch.stack([turn.cos(), turn.sin()], dim=-1)
    signals = paths @ torch.randn(2, sensors) + 0.1 * torch.randn(count + 96, steps, sensors)
    return Program(
        model=Tracker(sensors, int(torch.randint(20, 33, ())), 0.5, mended),
        rows=TensorDataset(signals[:count], paths[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[signals[count:], paths[count:]],
        guilty=Guilty("operation", ops=("log",)),
        steps=220,
    )
