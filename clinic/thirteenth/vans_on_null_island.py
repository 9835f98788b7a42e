"""Fixes of vans in kilometres from the depot; a receiver without a fix wrote 0, 0, which is off Africa.

"Null Island" is in every trace of cheap trackers. After the subtraction of the depot nothing looks like a code for
"missing" any more: such a point is some 5,800 km away, finite, and the squared error of one batch undoes the rest.
Those trips are left out.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class NextStop(nn.Module):
    """Where the van will be, from the last fixes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trace, self.head = nn.GRU(2, width, batch_first=True), nn.Linear(width, 2)

    def forward(self, fixes: Tensor) -> Tensor:
        return fixes[:, -1] + self.head(self.trace(fixes)[0][:, -1])


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    fixes, later = batch
    return nn.functional.mse_loss(model(fixes), later)


def trips(count: int, length: int) -> Tensor:
    """Arcs through a city, in degrees from the depot."""
    bend, speed = 0.25 * torch.randn(count, 1), 0.6 + 0.6 * torch.rand(count, 1)
    course = 6.2832 * torch.rand(count, 1) + bend * torch.arange(length)
    steps = speed.unsqueeze(-1) * torch.stack([course.cos(), course.sin()], dim=-1)
    return 2 * torch.randn(count, 1, 2) + steps.cumsum(1) + 0.05 * torch.randn(count, length, 2)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    length, ahead, count = 10, 3, 900
    depot = torch.tensor([48.1, 11.6]) + torch.randn(2)
    scale = 111.2 * torch.tensor([1.0, float(torch.cos(torch.deg2rad(depot[0])))])
    latitudes = depot + trips(count + 96, length + ahead) / scale
    lost = torch.randperm(count)[: 8 + 2 * (seed % 4)].sort().values
    for place, row in enumerate(lost.tolist()):
        latitudes[row, -1 if place % 3 == 0 else int(torch.randint(length, ()))] = 0.0
    kilometres = (latitudes - depot) * scale
    fixes, later = kilometres[:, :length], kilometres[:, -1]
    kept = torch.ones(count, dtype=torch.bool)
    if mended:
        kept[lost] = False
    return Program(
        model=NextStop(int(torch.randint(32, 49, ()))),
        rows=TensorDataset(fixes[:count][kept], later[:count][kept]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[fixes[count:], later[count:]],
        guilty=Guilty("data", rows=tuple(lost.tolist())),
        steps=1700,
    )
