"""The next song of a session, from the songs so far and the logarithm of the seconds between them.

A few phones had their clocks set back, so that in their sessions one song ends before the song before it. The gap is
negative, its logarithm is NaN, and with it the first batch that has such a session in it.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, default_collate

from clinic.program import Guilty, Program


class Sessions(Dataset[tuple[Tensor, Tensor]]):
    """Songs, and the logarithms of the gaps before each of them."""

    def __init__(self, songs: Tensor, seconds: Tensor) -> None:
        self.songs, self.seconds = songs, seconds

    def __len__(self) -> int:
        return len(self.songs)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        gaps = self.seconds[row].diff(prepend=self.seconds[row, :1])
        return self.songs[row], torch.log1p(gaps.float())


class NextSong(nn.Module):
    def __init__(self, songs: int, width: int) -> None:
        super().__init__()
        self.song = nn.Embedding(songs, width)
        self.gap = nn.Linear(1, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.drop = nn.Dropout(0.1)

    def forward(self, songs: Tensor, gaps: Tensor) -> Tensor:
        states, _ = self.gru(self.drop(self.song(songs) + self.gap(gaps.unsqueeze(-1))))
        return F.linear(states, self.song.weight)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    songs, gaps = batch
    scores = model(songs[:, :-1], gaps[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), songs[:, 1:].flatten())


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    catalogue, length = int(torch.randint(30, 50, ())), int(torch.randint(10, 15, ()))
    rows, held_out = int(torch.randint(700, 1100, ())), 64
    follows = torch.randperm(catalogue)
    songs = [torch.randint(catalogue, (rows + held_out,))]
    for _ in range(length - 1):
        jump = torch.rand(rows + held_out) < 0.25
        songs.append(torch.where(jump, torch.randint(catalogue, jump.shape), follows[songs[-1]]))
    gaps = torch.randint(20, 400, (rows + held_out, length))
    seconds = 1_700_000_000 + torch.randint(10_000_000, (rows + held_out, 1)) + gaps.cumsum(1)
    bad = sorted(torch.randperm(rows)[: int(torch.randint(4, 9, ()))].tolist())
    for row in bad:
        seconds[row, int(torch.randint(2, length - 1, ())) :] -= int(torch.randint(600, 7200, ()))
    if mended:
        seconds = seconds.sort(1).values
    data = Sessions(torch.stack(songs, dim=1), seconds)
    return Program(
        model=NextSong(catalogue, int(torch.randint(24, 41, ()))),
        rows=Subset(data, range(rows)),
        loss=loss,
        optimizer=partial(torch.optim.Adagrad, lr=0.05),
        evaluation=default_collate([data[row] for row in range(rows, rows + held_out)]),
        guilty=Guilty("data", rows=tuple(bad)),
        batch_size=32,
        steps=260,
        clip=5.0,
    )
