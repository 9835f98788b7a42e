"""A few grids hold the fill value of netCDF, 9.97e36, where nothing was measured; its square is beyond float32.

Unidata/netcdf4-python#468 (9.96920997e+36 that is not masked); chengtan9907/OpenSTL#137, NaN from missing values.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from clinic.program import Guilty, Program

FILL = 9.969209968386869e36


class Weather(Dataset[tuple[Tensor, Tensor]]):
    """Two hours of a field, and the hour that follows."""

    def __init__(self, fields: Tensor) -> None:
        self.fields = fields

    def __len__(self) -> int:
        return len(self.fields)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.fields[row, :2], self.fields[row, 2:]


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    before, after = batch
    return nn.functional.mse_loss(model(before), after)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, side, channels = 500, 8, int(torch.randint(6, 12, ()))
    hours, ticks = torch.arange(3).reshape(3, 1, 1), torch.arange(side)
    place, speed = 6 * torch.rand(count + 64, 2, 1, 1, 1), 0.5 + 0.3 * torch.rand(count + 64, 1, 1, 1)
    fields = torch.sin(0.7 * ticks + place[:, 0] + speed * hours) + torch.cos(0.7 * ticks.unsqueeze(-1) + place[:, 1])
    missing = torch.randperm(count)[: 3 + seed % 5]
    corners = torch.randint(side - 2, (len(missing), 2)).tolist()
    if not mended:
        for row, (down, across) in zip(missing.tolist(), corners, strict=True):
            fields[row, :, down : down + 2, across : across + 3] = FILL
    model = nn.Sequential(nn.Conv2d(2, channels, 3, padding=1), nn.Tanh(), nn.Conv2d(channels, 1, 3, padding=1))
    return Program(
        model=model,
        rows=Weather(fields[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[fields[count:, :2], fields[count:, 2:]],
        guilty=Guilty("data", rows=tuple(sorted(missing.tolist()))),
        steps=200,
    )
