"""Sliding window attention, where a short sequence is padded so far that the window of a place holds padding only.

Every key of such a place is masked, and softmax over nothing but minus infinity is NaN. That place is padding itself
and its vector is multiplied by zero in the mean, but NaN times zero is NaN: the question of everybody who combines
a local mask with a padding mask. The stations that a parcel passes tell whether it will be late.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from clinic.program import Guilty, Program

REACH = 8


class Local(nn.Module):
    def __init__(self, width: int, mended: bool) -> None:
        super().__init__()
        self.norm, self.parts, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mended = mended

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        query, key, value = self.parts(self.norm(x)).chunk(3, dim=-1)
        place = torch.arange(x.shape[1])
        near = (place[:, None] - place[None, :]).abs() <= REACH
        seen = near & real[:, None, :]
        scores = query @ key.transpose(1, 2) / x.shape[-1] ** 0.5
        nothing = torch.finfo(scores.dtype).min if self.mended else float("-inf")
        attention = torch.softmax(scores.masked_fill(~seen, nothing), dim=-1)  # guilty
        return x + self.out(attention @ value)


class Lateness(nn.Module):
    def __init__(self, stations: int, width: int, mended: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1 + stations, width, padding_idx=0)
        self.layers = nn.ModuleList([Local(width, mended) for _ in range(2)])
        self.head = nn.Linear(width, 2)

    def forward(self, route: Tensor) -> Tensor:
        real, x = route != 0, self.embedding(route)
        for layer in self.layers:
            x = layer(x, real)
        weight = real.unsqueeze(-1).float()
        return self.head((x * weight).sum(1) / weight.sum(1))


def collate(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return pad_sequence([route for route, _ in rows], batch_first=True), torch.tensor([late for _, late in rows])


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    route, late = batch
    return nn.functional.cross_entropy(model(route), late)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    stations, count = int(torch.randint(40, 60, ())), int(torch.randint(900, 1100, ()))
    delay = torch.randn(stations)
    lengths = torch.randint(16, 25, (count + 160,))
    direct = torch.randperm(count)[: 8 + seed % 5]
    lengths[direct] = torch.randint(2, 8, (len(direct),))  # parcels that passed a few stations only
    parcels: list[tuple[Tensor, int]] = []
    for length in lengths.tolist():
        route = torch.randint(stations, (length,))
        parcels.append((1 + route, int(delay[route].mean() > delay.mean())))
    return Program(
        model=Lateness(stations, 24, mended),
        rows=parcels[:count],
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=collate(parcels[count:]),
        guilty=Guilty("operation", ops=("softmax",)),
        collate=collate,
        steps=240,
    )
