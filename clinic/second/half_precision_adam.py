"""All weights are in half precision, in which Adam's epsilon of 1e-8 is zero: what has had no slope is divided by it.

A next-track recommender, put to `.half()` to save memory. Tracks that the first batch does not hold have a slope of
zero and a second moment of zero, and their update is zero over zero.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class NextTrack(nn.Module):
    """The mean of what was heard tells what comes next."""

    def __init__(self, tracks: int, width: int) -> None:
        super().__init__()
        self.heard = nn.Embedding(tracks, width)
        self.body = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tracks)

    def forward(self, history: Tensor) -> Tensor:
        recent = self.heard(history).mean(1)
        return self.head(self.norm(recent + self.body(recent).relu()))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    history, following = batch
    return nn.functional.cross_entropy(model(history).float(), following)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    genres, per_genre = int(torch.randint(5, 9, ())), int(torch.randint(40, 70, ()))
    rows, held_out, memory = int(torch.randint(900, 1500, ())), 128, int(torch.randint(4, 8, ()))
    genre = torch.randint(genres, (rows + held_out, 1))
    popular = (per_genre * torch.rand(rows + held_out, memory + 1).pow(12)).long()
    played = genre * per_genre + popular
    model = NextTrack(genres * per_genre, int(torch.randint(24, 40, ())))
    return Program(
        model=model if mended else model.half(),
        rows=TensorDataset(played[:rows, :-1], played[:rows, -1]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-2),
        evaluation=[played[rows:, :-1], played[rows:, -1]],
        guilty=Guilty("optimizer"),
        steps=200,
    )
