"""A recommender draws what a reader has not read by `torch.multinomial`; a few readers have read all there is.

"RuntimeError: invalid multinomial distribution (sum of probabilities <= 0)": negative sampling over a mask of what is
unread. A small catalogue and some accounts of the staff, or of robots, which have opened every title, suffice.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class TwoTowers(nn.Module):
    """A reader is the mean of what was read, a title its embedding."""

    def __init__(self, titles: int, width: int) -> None:
        super().__init__()
        self.title = nn.Linear(titles, width, bias=False)
        self.tower = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, titles))

    def forward(self, history: Tensor) -> Tensor:
        return self.tower(self.title(F.normalize(history, dim=-1)))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    history, bought, read = batch
    scores = model(history)
    negatives = torch.multinomial(1 - read, 8, replacement=True)
    ahead = scores.gather(1, bought.unsqueeze(1)) - scores.gather(1, negatives)
    return F.softplus(-ahead).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    titles, genres = int(torch.randint(40, 60, ())), int(torch.randint(4, 7, ()))
    readers, held_out = int(torch.randint(900, 1300, ())), 256
    every = readers + held_out
    genre_of, prefers = torch.randint(genres, (titles,)), torch.randint(genres, (every,))
    genre_of[:genres] = torch.arange(genres)
    chance = torch.where(genre_of == prefers.unsqueeze(1), 0.7, 0.04)
    read = torch.bernoulli(chance)
    bought = torch.multinomial(chance.pow(2) * (0.05 + read), 1).squeeze(1)
    read[torch.arange(every), bought] = 1.0
    staff = torch.randperm(readers)[: 3 + seed % 4].sort().values
    read[staff] = 1.0
    history = read.clone()
    history[torch.arange(every), bought] = 0.0
    if mended:  # of an account that has read everything, one title counts as unread
        read[staff, (bought[staff] + 1) % titles] = 0.0
    return Program(
        model=TwoTowers(titles, int(torch.randint(16, 32, ()))),
        rows=TensorDataset(history[:readers], bought[:readers], read[:readers]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[history[readers:], bought[readers:], read[readers:]],
        guilty=Guilty("data", rows=tuple(staff.tolist())),
        batch_size=64,
    )
