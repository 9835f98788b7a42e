"""Gifts of donors with their dates as the database wrote them: MySQL's date for "unknown" is 0000-00-00, which is none.

`date.fromisoformat` raises ValueError, "year 0 is out of range", and the loader hands it on: the run ends in its first
epoch, each time after another number of batches. Asked wherever a table leaves MySQL (`zeroDateTimeBehavior` is there
for nothing else).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date, timedelta
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from clinic.program import Guilty, Program


class Gifts(Dataset[tuple[Tensor, Tensor, float]]):
    """The last gifts of each donor, their dates (ISO), and what the next one was in logarithms."""

    def __init__(self, dates: Sequence[Sequence[str]], amounts: Tensor, following: Tensor) -> None:
        self.dates, self.amounts, self.following = dates, amounts, following.tolist()

    def __len__(self) -> int:
        return len(self.dates)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor, float]:
        given = [date.fromisoformat(text) for text in self.dates[row]]
        ago = torch.tensor([(given[-1] - one).days for one in given]) / 365.0
        season = torch.tensor([one.timetuple().tm_yday for one in given]) * (2 * math.pi / 365.25)
        return torch.stack([ago, season.sin(), season.cos()], dim=-1), self.amounts[row], self.following[row]


class Donor(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gift = nn.Linear(4, size)
        self.encoder = nn.TransformerEncoderLayer(size, 4, 2 * size, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, 1))

    def forward(self, times: Tensor, amounts: Tensor) -> Tensor:
        gifts = self.encoder(self.gift(torch.cat([times, amounts.unsqueeze(-1)], dim=-1)))
        return self.head(gifts.mean(dim=1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    times, amounts, following = batch
    return nn.functional.mse_loss(model(times, amounts), following.float())


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    length, count = 6 + seed % 3, 800
    start = date(2012, 1, 1)
    days = torch.randint(20, 400, (count + 96, length)).cumsum(dim=1)
    dates = [[(start + timedelta(days=day)).isoformat() for day in donor] for donor in days.tolist()]
    amounts = torch.randn(count + 96, 1) + 0.5 * torch.randn(count + 96, length)
    winter = torch.cos(days * (2 * math.pi / 365.25))  # Christmas, and those who give then
    following = (amounts * torch.softmax(2 * winter, dim=1)).sum(dim=1) + 0.5 * winter[:, -1]
    unknown = torch.randperm(count)[: 2 + seed % 4].sort().values.tolist()
    which = torch.randint(length, (len(unknown),)).tolist()
    if not mended:
        for row, gift in zip(unknown, which, strict=True):
            dates[row][gift] = "0000-00-00"
    healthy = Gifts(dates[count:], amounts[count:], following[count:])
    return Program(
        model=Donor(int(torch.randint(6, 10, ())) * 4),
        rows=Gifts(dates[:count], amounts[:count], following[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=torch.utils.data.default_collate([healthy[row] for row in range(len(healthy))]),
        guilty=Guilty("data", rows=tuple(unknown)),
        steps=280,
    )
