"""The temperature of a Gumbel softmax is lowered by the same amount at every step, until it is zero.

A discrete autoencoder of customer records. Someone who shortened the schedule and not the run divides by zero from the
middle of the run on, in every batch.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Discrete(nn.Module):
    """A few codes with a few values each."""

    def __init__(self, traits: int, codes: int, values: int, schedule: int, lowest: float) -> None:
        super().__init__()
        self.codes, self.values, self.schedule, self.lowest = codes, values, schedule, lowest
        self.encode = nn.Sequential(nn.Linear(traits, 48), nn.ReLU(), nn.Linear(48, codes * values))
        self.decode = nn.Sequential(nn.Linear(codes * values, 48), nn.ReLU(), nn.Linear(48, traits))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, traits: Tensor) -> Tensor:
        logits = self.encode(traits).unflatten(-1, (self.codes, self.values))
        if self.training:
            self.seen += 1
            temperature = max(1 - float(self.seen) / self.schedule, self.lowest)
            chosen = F.gumbel_softmax(logits, tau=temperature, dim=-1)  # guilty
        else:
            chosen = F.one_hot(logits.argmax(-1), self.values).float()
        return self.decode(chosen.flatten(1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (traits,) = batch
    return F.mse_loss(model(traits), traits)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    codes, values, traits = int(torch.randint(3, 5, ())), int(torch.randint(4, 6, ())), int(torch.randint(10, 16, ()))
    rows, held_out = int(torch.randint(1000, 1600, ())), 128
    kinds = torch.randn(codes, values, traits)
    drawn = torch.randint(values, (rows + held_out, codes))
    records = sum(kinds[code, drawn[:, code]] for code in range(codes)) + 0.1 * torch.randn(rows + held_out, traits)
    schedule = int(torch.randint(50, 80, ()))
    return Program(
        model=Discrete(traits, codes, values, schedule, lowest=0.5 if mended else 0.0),
        rows=TensorDataset(records[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[records[rows:]],
        guilty=Guilty("operation", ops=("gumbel_softmax", "div", "softmax")),
        steps=320,
    )
