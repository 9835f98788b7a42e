"""A few labels count from one, or are a grey value and no class at all: "Target 7 is out of bounds."

milesial/Pytorch-UNet#291 ("Target 192 is out of bounds"), EricFillion/happy-transformer#248 (-1).
"""

from __future__ import annotations

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
    features, classes, count = 6 + seed % 8, 4 + seed % 4, 1000
    centres = 1.5 * torch.randn(classes, features)
    labels = torch.randint(classes, (count + 96,))
    inputs = centres[labels] + torch.randn(count + 96, features)
    wrong = torch.randperm(count)[: 2 + seed % 4]
    if not mended:
        labels[wrong] = torch.tensor([classes, -1, 192, 255, classes + 3])[: len(wrong)]
    width = int(torch.randint(32, 64, ()))
    model = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, classes))
    return Program(
        model=model,
        rows=TensorDataset(inputs[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        evaluation=[inputs[count:], labels[count:]],
        guilty=Guilty("data", rows=tuple(sorted(wrong.tolist()))),
        steps=200,
    )
