"""Experts that each give a probability, weighed by a softmax: where all are sure, the sum is 1.0000001.

Spam detection. `binary_cross_entropy` checks its arguments: "all elements of input should be between 0 and 1". It takes
mail that is beyond doubt, and weights that are rounded upwards.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Experts(nn.Module):
    """A gate, and experts of one hidden layer each."""

    def __init__(self, words: int, experts: int, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.gate = nn.Linear(words, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(words, width), nn.ReLU(), nn.Linear(width, 1)) for _ in range(experts)
        )

    def forward(self, mail: Tensor) -> Tensor:
        weights = self.gate(mail).softmax(-1)
        sure = torch.cat([expert(mail) for expert in self.experts], dim=-1).sigmoid()
        chance = (weights * sure).sum(-1)  # guilty
        return chance.clamp(1e-6, 1 - 1e-6) if self.mended else chance


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    mail, spam = batch
    return F.binary_cross_entropy(model(mail), spam)  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, experts = int(torch.randint(24, 40, ())), int(torch.randint(5, 9, ()))
    rows, held_out = int(torch.randint(1200, 2000, ())), 128
    counts = torch.poisson(torch.rand(rows + held_out, words).pow(3) * 4)
    taste = torch.randn(words)
    merit = (counts - counts.mean(0)) @ taste
    spam = (merit + 0.5 * torch.randn(rows + held_out) > 0).float()
    campaign = torch.rand(rows + held_out) < 0.08  # sent by machines, which repeat the words that sell
    counts[campaign] += 10 * torch.poisson(torch.full((words,), 1.0)) * (taste > 0)
    spam[campaign] = 1.0
    return Program(
        model=Experts(words, experts, int(torch.randint(16, 28, ())), mended),
        rows=TensorDataset(counts[:rows], spam[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[counts[rows:], spam[rows:]],
        guilty=Guilty("operation", ops=("sum", "binary_cross_entropy")),
        steps=260,
    )
