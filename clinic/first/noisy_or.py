"""Noisy-or over the instances of a bag: one is beyond doubt, all values are right, and `log1p(-1)` has no slope.

Asked on forums as "multiple instance learning, loss is small and fine, then the gradient is suddenly NaN".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Bags(nn.Module):
    """The chance that at least one instance of a bag shows it."""

    def __init__(self, features: int, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.instance = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, bags: Tensor) -> Tensor:
        logits = self.instance(bags).squeeze(-1)
        if self.mended:
            none = nn.functional.logsigmoid(-logits).sum(dim=-1).exp()
        else:
            chance = torch.sigmoid(logits)
            none = torch.log1p(-chance).sum(dim=-1).exp()  # guilty
        return 1 - none


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    bags, labels = batch
    return nn.functional.binary_cross_entropy(model(bags), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, instances, count = 6 + seed % 5, 5 + seed % 4, 800
    shown = torch.rand(count + 96, instances) < 0.12
    bags = torch.randn(count + 96, instances, features)
    strength = 5.0 + 30.0 * torch.rand(count + 96, instances) ** 4
    bags[..., :2] += (strength * shown - 2.0).unsqueeze(-1)
    labels = shown.any(dim=-1).float()
    return Program(
        model=Bags(features, int(torch.randint(24, 48, ())), mended),
        rows=TensorDataset(bags[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[bags[count:], labels[count:]],
        guilty=Guilty("operation", ops=("log1p",)),
    )
