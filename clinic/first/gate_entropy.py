"""A mixture of experts zeroes all gates but the best, and the entropy of the gates, by hand, takes their log.

The 0 * log(0) of Lightning-AI/torchmetrics#1029 ("KL-Divergence gives NaN on 0-probabilities"), here with slopes.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Experts(nn.Module):
    def __init__(self, features: int, experts: int, kept: int) -> None:
        super().__init__()
        self.kept = kept
        self.gate = nn.Linear(features, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(experts)
        )

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.gate(inputs).softmax(dim=-1)
        best = gates.topk(self.kept, dim=-1)
        gates = torch.zeros_like(gates).scatter(-1, best.indices, best.values)
        gates = gates / gates.sum(dim=-1, keepdim=True)
        answers = torch.cat([expert(inputs) for expert in self.experts], dim=-1)
        return (gates * answers).sum(dim=-1), gates


def entropy(gates: Tensor, mended: bool) -> Tensor:
    if mended:
        return -(gates * gates.clamp(min=1e-9).log()).sum(dim=-1)
    return -(gates * gates.log()).sum(dim=-1)  # guilty


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    inputs, targets = batch
    outputs, gates = model(inputs)
    return nn.functional.mse_loss(outputs, targets) - 0.01 * entropy(gates, mended).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, experts, count = 6 + seed % 4, 4 + seed % 3, 900
    inputs = torch.randn(count + 96, features)
    targets = torch.where(inputs[:, 0] > 0, 2 * inputs[:, 1], inputs[:, 2].abs() - 1)
    return Program(
        model=Experts(features, experts, kept=2 + seed % 2),
        rows=TensorDataset(inputs[:count], targets[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.AdamW, lr=6e-3),
        evaluation=[inputs[count:], targets[count:]],
        guilty=Guilty("operation", ops=("log", "mul")),
        steps=200,
    )
