"""A layer of ratios that divides by how far each channel is from a reference channel: for that one it is x / (x - x).

Asked on forums as "all my outputs are NaN from the first batch on, the inputs are fine".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Contrast(nn.Module):
    """Each channel over its distance from the reference channel."""

    def __init__(self, reference: int, mended: bool) -> None:
        super().__init__()
        self.reference = reference
        self.mended = mended

    def forward(self, hidden: Tensor) -> Tensor:
        distance = hidden - hidden[:, self.reference : self.reference + 1]
        if self.mended:
            distance = torch.where(distance.abs() < 0.3, torch.full_like(distance, 0.3), distance)
        return torch.tanh(hidden / distance)  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.smooth_l1_loss(model(inputs), targets)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, width, count = 5 + seed % 6, int(torch.randint(20, 36, ())), 1000
    inputs = torch.randn(count + 64, features)
    targets = torch.stack([inputs[:, 0] - inputs[:, 1], 2 * inputs[:, 2]], dim=-1)
    model = nn.Sequential(
        nn.Linear(features, width),
        nn.Tanh(),
        Contrast(int(torch.randint(width, ())), mended),
        nn.Linear(width, 32),
        nn.ReLU(),
        nn.Linear(32, 2),
    )
    return Program(
        model=model,
        rows=TensorDataset(inputs[:count], targets[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        evaluation=[inputs[count:], targets[count:]],
        guilty=Guilty("operation", ops=("div", "true_divide")),
    )
