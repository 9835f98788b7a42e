"""Parcels: whether one is late, and by how many hours, where only the late ones go through the second head.

The second head has a batch norm, and once in a while a single parcel of the batch is late: "Expected more than 1 value
per channel when training". The same happens to heads for rare classes and to experts that get one token. The drop of
the last batch, which is the usual advice, does not help.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Hours(nn.Module):
    """How many hours late, on the scale of a logarithm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 1)

    def forward(self, state: Tensor) -> Tensor:
        inner = self.inner(state)
        return self.outer(self.norm(inner).relu()).squeeze(-1)  # guilty


class Parcels(nn.Module):
    """An embedding of the depot beside the numbers, a trunk, and two heads."""

    def __init__(self, depots: int, numbers: int, width: int, whole: bool) -> None:
        super().__init__()
        self.depot = nn.Embedding(depots, 8)
        self.trunk = nn.Sequential(nn.Linear(8 + numbers, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.late, self.hours, self.whole = nn.Linear(width, 1), Hours(width), whole

    def forward(self, depot: Tensor, numbers: Tensor, late: Tensor) -> tuple[Tensor, Tensor]:
        state = self.trunk(torch.cat([self.depot(depot), numbers], dim=-1))
        logit = self.late(state).squeeze(-1)
        if self.whole:
            return logit, self.hours(state)[late]
        return logit, self.hours(state[late]) if late.any() else state.new_zeros(0)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    depot, numbers, late, hours = batch
    logit, guess = model(depot, numbers, late)
    loss = F.binary_cross_entropy_with_logits(logit, late.float())
    return loss + F.mse_loss(guess, hours[late]) if late.any() else loss


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    depots, features, width = int(torch.randint(12, 30, ())), int(torch.randint(5, 9, ())), 40
    rows, held_out = int(torch.randint(2000, 3000, ())), 600
    depot, numbers = torch.randint(depots, (rows + held_out,)), torch.randn(rows + held_out, features)
    strain = numbers[:, 0] - numbers[:, 1] * numbers[:, 2] + torch.randn(depots)[depot]
    late = strain > strain.quantile(0.85)
    hours = (1 + numbers[:, 3] + 0.7 * numbers[:, 4].abs() + 0.2 * torch.randn(rows + held_out)) * 1.5
    columns = [depot, numbers, late, hours]
    return Program(
        model=Parcels(depots, features, width, whole=mended),
        rows=TensorDataset(*(column[:rows] for column in columns)),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[column[rows:] for column in columns],
        guilty=Guilty("operation", ops=("batch_norm", "BatchNorm1d")),
        batch_size=32,
        steps=400,
    )
