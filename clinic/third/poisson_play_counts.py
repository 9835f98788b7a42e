"""Play counts as Poisson numbers whose rate is the exponential of a product of factors, by SGD at the rate of ratings.

The slope is the difference of an exponential and a count. A user who played a song two hundred times makes a step that
puts the next exponential out of reach, and this happens in the first batches.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Factors(nn.Module):
    def __init__(self, users: int, songs: int, width: int) -> None:
        super().__init__()
        self.user, self.song = nn.Embedding(users, width), nn.Embedding(songs, width)
        self.user_bias, self.song_bias = nn.Embedding(users, 1), nn.Embedding(songs, 1)
        for table in (self.user, self.song):
            nn.init.normal_(table.weight, std=0.1)
        for table in (self.user_bias, self.song_bias):
            nn.init.zeros_(table.weight)

    def forward(self, user: Tensor, song: Tensor) -> Tensor:
        product = (self.user(user) * self.song(song)).sum(-1)
        return product + self.user_bias(user).squeeze(-1) + self.song_bias(song).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    user, song, plays = batch
    return F.poisson_nll_loss(model(user, song), plays, log_input=True, full=True)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    users, songs, width = int(torch.randint(40, 70, ())), int(torch.randint(30, 50, ())), 4
    rows, held_out = int(torch.randint(2500, 3500, ())), 256
    fan, hit = 0.8 * torch.randn(users), 0.8 * torch.randn(songs)
    user, song = torch.randint(users, (rows + held_out,)), torch.randint(songs, (rows + held_out,))
    plays = torch.poisson((2.2 + fan[user] + hit[song]).exp())
    return Program(
        model=Factors(users, songs, width),
        rows=TensorDataset(user[:rows], song[:rows], plays[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.15 if mended else 8.0),
        evaluation=[user[rows:], song[rows:], plays[rows:]],
        guilty=Guilty("explosion"),
        batch_size=64,
        steps=500,
    )
