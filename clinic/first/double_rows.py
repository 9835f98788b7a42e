"""A handful of rows came in as double; one of them makes its whole batch double, and the first layer refuses it.

theislab/scarches#246, "mat1 and mat2 must have the same dtype, but got Double and Float".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from clinic.program import Guilty, Program


class Profiles:
    """Rows that were read from several files, kept as they came."""

    def __init__(self, profiles: Tensor, ages: Tensor, doubles: list[int]) -> None:
        self.profiles = [profile.double() if row in doubles else profile for row, profile in enumerate(profiles)]
        self.ages = list(ages)

    def __len__(self) -> int:
        return len(self.profiles)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.profiles[row], self.ages[row]


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    profiles, ages = batch
    return nn.functional.l1_loss(model(profiles).squeeze(-1), ages)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    genes, count = 10 + seed % 9, 700
    profiles = torch.randn(count + 64, genes)
    ages = profiles[:, 0] - 2 * profiles[:, 1] + profiles[:, 2].abs()
    doubles = torch.randperm(count)[: 2 + seed % 3].sort().values.tolist()
    width = int(torch.randint(32, 64, ()))
    return Program(
        model=nn.Sequential(nn.Linear(genes, width), nn.ELU(), nn.Linear(width, 1)),
        rows=Profiles(profiles[:count], ages[:count], [] if mended else doubles),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[profiles[count:], ages[count:]],
        guilty=Guilty("data", rows=tuple(doubles)),
    )
