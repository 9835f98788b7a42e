"""The log-cosh loss by hand, on targets that are not scaled: `cosh` of an error of 90 is beyond float32.

Lightning-AI/torchmetrics#3488, "LogCoshError returns inf for finite large residuals"; keras-team/keras#8524.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class LogCosh(nn.Module):
    def __init__(self, mended: bool) -> None:
        super().__init__()
        self.mended = mended

    def forward(self, predicted: Tensor, targets: Tensor) -> Tensor:
        error = predicted - targets
        if self.mended:
            return (error + nn.functional.softplus(-2 * error) - math.log(2)).mean()
        return torch.log(torch.cosh(error)).mean()  # guilty


def loss(model: nn.Module, batch: list[Tensor], criterion: LogCosh) -> Tensor:
    inputs, pressure = batch
    return criterion(model(inputs).squeeze(-1), pressure)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 5 + seed % 4, 900
    inputs = torch.randn(count + 96, features)
    pressure = 120 + 10 * inputs[:, 0] - 8 * inputs[:, 1] + 5 * inputs[:, 2].abs()  # mmHg
    width = int(torch.randint(32, 48, ()))
    return Program(
        model=nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 1)),
        rows=TensorDataset(inputs[:count], pressure[:count]),
        loss=partial(loss, criterion=LogCosh(mended)),
        optimizer=partial(torch.optim.Adam, lr=3e-2),
        evaluation=[inputs[count:], pressure[count:]],
        guilty=Guilty("overflow", ops=("cosh",)),
    )
