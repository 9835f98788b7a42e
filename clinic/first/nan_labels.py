"""Measurements that failed are NaN in the column of labels.

Nixtla/neuralforecast#186, "training with NaNs values": missing values in `y`, and the loss becomes NaN during training;
deepmodeling/Uni-Mol#162.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Toxicity(nn.Module):
    """Several assays at once, from a bag of groups of atoms."""

    def __init__(self, groups: int, size: int, assays: int) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(groups, size, mode="mean")
        self.head = nn.Sequential(nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, assays))

    def forward(self, molecules: Tensor) -> Tensor:
        return self.head(self.embedding(molecules))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    molecules, assays = batch
    return nn.functional.binary_cross_entropy_with_logits(model(molecules), assays)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    groups, assays, count = 30 + seed % 11, 3 + seed % 3, 900
    molecules = torch.randint(groups, (count + 96, 6))
    poison = torch.randn(groups, assays)
    outcomes = (poison[molecules].mean(dim=1) > 0).float()
    failed = torch.randperm(count)[: 2 + seed % 5]
    which = torch.randint(assays, (len(failed),))
    if not mended:
        outcomes[failed, which] = math.nan
    return Program(
        model=Toxicity(groups, int(torch.randint(16, 24, ())), assays),
        rows=TensorDataset(molecules[:count], outcomes[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[molecules[count:], outcomes[count:]],
        guilty=Guilty("data", rows=tuple(sorted(failed.tolist()))),
        steps=220,
    )
