"""A few electricity meters report watt hours where all others report kilowatt hours: labels a thousand times too large.

Nothing is ever infinite. The squared error of a single such row outweighs all others by far, and the model is pulled
about whenever one comes up.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clinic.program import Guilty, Program


class Households(torch.utils.data.Dataset):
    """What is known of a household and what it uses in a day."""

    def __init__(self, tariff: Tensor, numbers: Tensor, usage: Tensor) -> None:
        self.tariff, self.numbers, self.usage = tariff, numbers, usage

    def __len__(self) -> int:
        return len(self.usage)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"tariff": self.tariff[row], "numbers": self.numbers[row], "usage": self.usage[row]}


class UsageNet(nn.Module):
    """An embedding of the tariff beside the numbers."""

    def __init__(self, tariffs: int, numbers: int, width: int) -> None:
        super().__init__()
        self.tariff = nn.Embedding(tariffs, 4)
        self.body = nn.Sequential(nn.Linear(4 + numbers, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 1)

    def forward(self, tariff: Tensor, numbers: Tensor) -> Tensor:
        return self.head(self.body(torch.cat([self.tariff(tariff), numbers], dim=-1))).squeeze(-1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["tariff"], batch["numbers"]), batch["usage"])


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    tariffs, numbers = int(torch.randint(3, 7, ())), int(torch.randint(4, 8, ()))
    rows, held_out = int(torch.randint(900, 1500, ())), 128
    tariff = torch.randint(tariffs, (rows + held_out,))
    described = torch.randn(rows + held_out, numbers)
    usage = 8 + 2 * described[:, 0] + torch.relu(3 * described[:, 1]) + tariff + 0.3 * torch.randn(rows + held_out)
    rotten = sorted(torch.randperm(rows)[: int(torch.randint(4, 9, ()))].tolist())
    if not mended:
        usage[rotten] *= 1000
    evaluation = {"tariff": tariff[rows:], "numbers": described[rows:], "usage": usage[rows:]}
    return Program(
        model=UsageNet(tariffs, numbers, int(torch.randint(32, 56, ()))),
        rows=Households(tariff[:rows], described[:rows], usage[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=evaluation,
        guilty=Guilty("data", rows=tuple(rotten)),
    )
