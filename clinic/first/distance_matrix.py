"""All distances within a batch as the root of a sum of squares: the diagonal is zero, and there the root has no slope.

pytorch/pytorch#2775 (a norm has a slope at zero, `.pow(2).sum().sqrt()` has none) and pytorch/pytorch#6394.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Embedder(nn.Module):
    def __init__(self, features: int, width: int, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, size))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class ContrastiveLoss(nn.Module):
    """Pulls a class together, pushes others away up to the margin."""

    def __init__(self, margin: float, mended: bool) -> None:
        super().__init__()
        self.margin = margin
        self.mended = mended

    def distances(self, embedded: Tensor) -> Tensor:
        squares = (embedded[:, None] - embedded[None, :]).pow(2).sum(dim=-1)
        if self.mended:
            squares = squares.clamp(min=1e-12)
        return squares.sqrt()  # guilty

    def forward(self, embedded: Tensor, labels: Tensor) -> Tensor:
        distances = self.distances(embedded)
        same = labels[:, None] == labels[None, :]
        return torch.where(same, distances**2, (self.margin - distances).relu() ** 2).mean()


def loss(model: nn.Module, batch: list[Tensor], criterion: ContrastiveLoss) -> Tensor:
    inputs, labels = batch
    return criterion(model(inputs), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    classes, features, count = 4 + seed % 4, 10 + seed % 5, 700
    centres = 2 * torch.randn(classes, features)
    labels = torch.randint(classes, (count + 64,))
    inputs = centres[labels] + torch.randn(count + 64, features)
    return Program(
        model=Embedder(features, int(torch.randint(32, 64, ())), 8),
        rows=TensorDataset(inputs[:count], labels[:count]),
        loss=partial(loss, criterion=ContrastiveLoss(2.0, mended)),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[inputs[count:], labels[count:]],
        guilty=Guilty("operation", ops=("sqrt",)),
        steps=180,
    )
