"""Series with growth rates that somebody worked out beforehand: after a value of zero the rate is infinite.

alteryx/featuretools#1496, "it outputs **inf**, when it should output **NaN**".
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from clinic.program import Guilty, Program


class GrowthRates(Dataset[dict[str, Tensor]]):
    def __init__(self, rates: Tensor, following: Tensor) -> None:
        self.rates = rates
        self.following = following

    def __len__(self) -> int:
        return len(self.rates)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"rates": self.rates[row], "following": self.following[row]}


class Forecast(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(1, size, batch_first=True)
        self.head = nn.Linear(size, 1)

    def forward(self, rates: Tensor) -> Tensor:
        states, _ = self.rnn(rates.unsqueeze(-1))
        return self.head(states[:, -1]).squeeze(-1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["rates"]), batch["following"])


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, length = 600, 9 + seed % 4
    steps = torch.arange(length + 1) * (0.4 + 0.5 * torch.rand(count + 64, 1)) + 6 * torch.rand(count + 64, 1)
    waves = steps.sin() + 0.05 * torch.randn(count + 64, length + 1)
    rates, following = waves[:, :-1].clone(), waves[:, -1].clone()
    broken = torch.randperm(count)[: 3 + seed % 4]
    when = torch.randint(length, (len(broken),))
    if not mended:
        rates[broken, when] = math.inf
        rates[broken[0], when[0]] = -math.inf
    return Program(
        model=Forecast(int(torch.randint(12, 20, ()))),
        rows=GrowthRates(rates[:count], following[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation={"rates": rates[count:], "following": following[count:]},
        guilty=Guilty("data", rows=tuple(sorted(broken.tolist()))),
        steps=180,
    )
