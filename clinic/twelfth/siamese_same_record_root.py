"""Record linkage by a siamese network: pairs of equal records are at distance 0, where the root has no finite slope.

"Contrastive loss nan, euclidean distance sqrt(0)" is one of the oldest threads of the forum. Some customers are in the
table twice, letter by letter: the best rows that there are, and the root turns their zero gradient into NaN.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Twins(nn.Module):
    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 8))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """The squared distance."""
        return ((self.body(left) - self.body(right)) ** 2).sum(-1)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    left, right, same = batch
    squared = model(left, right)
    if mended:
        squared = squared + 1e-8
    distance = torch.sqrt(squared)  # guilty
    apart = (1.5 - distance).clamp(min=0)
    return (same * distance**2 + (1 - same) * apart**2).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 10 + seed % 4, 1200
    left = torch.randn(count + 96, features)
    same = (torch.rand(count + 96) < 0.5).float()
    spelled = torch.ones(features)
    spelled[: features // 2] = 0.1
    again = left + spelled * torch.randn(count + 96, features)
    right = torch.where(same.unsqueeze(-1) > 0, again, torch.randn(count + 96, features))
    twice = torch.randperm(count)[: count // 11]
    right[twice], same[twice] = left[twice], 1.0
    return Program(
        model=Twins(features, int(torch.randint(24, 40, ()))),
        rows=TensorDataset(left[:count], right[:count], same[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[left[count:], right[count:], same[count:]],
        guilty=Guilty("operation", ops=("sqrt",)),
        steps=300,
    )
