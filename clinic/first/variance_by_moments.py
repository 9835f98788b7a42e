"""The spread of a window as E[x²] - E[x]²: of a sensor that idles at 1000 hPa, rounding makes it negative: no root.

TA-Lib/ta-lib#202 tells this of flat stretches; in anthonymlortiz/lcn#4 "var becomes negative".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Activity(nn.Module):
    def __init__(self, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.layers = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))

    def moments(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        mean = windows.mean(dim=-1)
        if self.mended:
            return mean, windows.std(dim=-1, correction=0)
        variance = (windows**2).mean(dim=-1) - mean**2
        return mean, variance.sqrt()  # guilty

    def forward(self, windows: Tensor) -> Tensor:
        mean, spread = self.moments(windows)
        return self.layers(torch.stack([mean / 1000, spread], dim=-1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    windows, exertion = batch
    return nn.functional.mse_loss(model(windows), exertion)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, length = 1200, 40 + seed % 17
    level = 950 + 100 * torch.rand(count + 64, 1)
    spread = 1 + 4 * torch.rand(count + 64, 1)
    idle = torch.randperm(count)[: 12 + 4 * (seed % 3)]
    spread[idle] = 1e-4
    windows = level + spread * torch.randn(count + 64, length)
    exertion = 0.5 * spread.squeeze(-1) ** 2
    return Program(
        model=Activity(int(torch.randint(16, 32, ())), mended),
        rows=TensorDataset(windows[:count], exertion[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[windows[count:], exertion[count:]],
        guilty=Guilty("operation", ops=("sqrt",)),
    )
