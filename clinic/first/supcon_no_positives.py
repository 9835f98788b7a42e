"""Supervised contrastive loss where an anchor is the only one of its class in the batch: 0 positives, divided by 0.

HobbitLong/SupContrast#141, "NaN loss for no positive pair from SupCon"; KevinMusgrave/pytorch-metric-learning#107.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Encoder(nn.Module):
    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 12))

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.normalize(self.layers(inputs), dim=-1)


class SupConLoss(nn.Module):
    def __init__(self, temperature: float, mended: bool) -> None:
        super().__init__()
        self.temperature = temperature
        self.mended = mended

    def forward(self, embedded: Tensor, labels: Tensor) -> Tensor:
        itself = torch.eye(len(labels), dtype=torch.bool)
        positives = ((labels[:, None] == labels[None, :]) & ~itself).float()
        similarity = embedded @ embedded.T / self.temperature
        log_chance = similarity - similarity.masked_fill(itself, -1e9).logsumexp(dim=1, keepdim=True)
        partners = positives.sum(dim=1)
        if self.mended:
            partners = partners.clamp(min=1)
        return -((positives * log_chance).sum(dim=1) / partners).mean()  # guilty


def loss(model: nn.Module, batch: list[Tensor], criterion: SupConLoss) -> Tensor:
    inputs, labels = batch
    return criterion(model(inputs), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    classes, features, count = 8 + seed % 4, 12, 900
    centres = 1.3 * torch.randn(classes, features)
    labels = torch.randint(classes - 1, (count + 32,))
    labels[torch.rand(count + 32) < 0.01 + 0.01 * (seed % 2)] = classes - 1  # a class of few
    inputs = centres[labels] + torch.randn(count + 32, features)
    return Program(
        model=Encoder(features, int(torch.randint(32, 64, ()))),
        rows=TensorDataset(inputs[:count], labels[:count]),
        loss=partial(loss, criterion=SupConLoss(0.07, mended)),
        optimizer=partial(torch.optim.Adam, lr=6e-3),
        evaluation=[inputs[count:], labels[count:]],
        guilty=Guilty("operation", ops=("div", "true_divide")),
        steps=220,
    )
