"""A geometric mean over gates of which dropout has zeroed a few: the mean is 0, and its slope 0 times infinity.

Asked on forums as "torch.log in the forward pass, loss is fine, all gradients are NaN"; in evaluation nothing is wrong.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class GateGroups(nn.Module):
    """Gates in groups, of each of which the geometric mean goes on."""

    def __init__(self, features: int, groups: int, size: int, dropout: float, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.shape = (groups, size)
        self.gates = nn.Linear(features, groups * size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.mended:
            gates = self.gates(inputs).sigmoid().unflatten(-1, self.shape)
            return self.dropout(gates.log().mean(dim=-1).exp())
        gates = self.dropout(self.gates(inputs).sigmoid()).unflatten(-1, self.shape)
        return gates.log().mean(dim=-1).exp()  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, groups, size, count = 7 + seed % 4, int(torch.randint(10, 20, ())), 3, 900
    inputs = torch.randn(count + 96, features)
    labels = ((inputs[:, 0] > 0) & (inputs[:, 1] > 0)).long() + (inputs[:, 2] > 0.8).long()
    layer = GateGroups(features, groups, size, dropout=0.02 + 0.02 * (seed % 3), mended=mended)
    return Program(
        model=nn.Sequential(layer, nn.Linear(groups, 3)),
        rows=TensorDataset(inputs[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-2),
        evaluation=[inputs[count:], labels[count:]],
        guilty=Guilty("operation", ops=("log",)),
    )
