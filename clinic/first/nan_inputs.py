"""A table with a few empty cells, which the reader of the file turns into NaN.

circleAhn/TESLA-tf#1, "The NaN loss issue you're experiencing is likely due to missing or NaN values in your dataset".
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    columns, classes, count = 8 + seed % 7, 3, 1300
    inputs = torch.randn(count + 96, columns)
    labels = (inputs @ torch.randn(columns, classes) + inputs[:, :1] * inputs[:, 1:2]).argmax(dim=-1)
    empty = torch.randperm(count)[: 3 + seed % 6]
    cells = torch.randint(columns, (len(empty),))
    if not mended:
        inputs[empty, cells] = math.nan
    width = int(torch.randint(24, 48, ()))
    model = nn.Sequential(
        nn.Linear(columns, width),
        nn.LayerNorm(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 3),
    )
    return Program(
        model=model,
        rows=TensorDataset(inputs[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=5e-3),
        evaluation=[inputs[count:], labels[count:]],
        guilty=Guilty("data", rows=tuple(sorted(empty.tolist()))),
    )
