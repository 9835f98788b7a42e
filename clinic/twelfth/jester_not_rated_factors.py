"""Ratings of jokes from -10 to 10, in which 99 means "not rated": the factorization learns that some love everything.

The code is that of the Jester data set, and its readme is read too late by many. The rows are no ratings at all.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

NOT_RATED = 99.0


class Factors(nn.Module):
    """Biases and a scalar product."""

    def __init__(self, users: int, jokes: int, size: int) -> None:
        super().__init__()
        self.user, self.joke = nn.Embedding(users, size), nn.Embedding(jokes, size)
        self.user_bias, self.joke_bias = nn.Embedding(users, 1), nn.Embedding(jokes, 1)
        for table in (self.user, self.joke, self.user_bias, self.joke_bias):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, jokes: Tensor) -> Tensor:
        bias = (self.user_bias(users) + self.joke_bias(jokes)).squeeze(-1)
        return bias + (self.user(users) * self.joke(jokes)).sum(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    users, jokes, ratings = batch
    return nn.functional.mse_loss(model(users, jokes), ratings)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    people, texts, count = 50 + 5 * (seed % 3), 20, 1600
    users, jokes = torch.randint(people, (count + 96,)), torch.randint(texts, (count + 96,))
    mood, wit = 3.0 * torch.randn(people), 2.5 * torch.randn(texts)
    ratings = (1 + mood[users] + wit[jokes] + 1.2 * torch.randn(count + 96)).clamp(-10, 10)
    bad = torch.randperm(count)[: 40 + int(torch.randint(10, ()))]
    ratings[bad] = NOT_RATED
    keep = torch.ones(count, dtype=torch.bool)
    if mended:
        keep[bad] = False
    return Program(
        model=Factors(people, texts, int(torch.randint(2, 5, ()))),
        rows=TensorDataset(users[:count][keep], jokes[:count][keep], ratings[:count][keep]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-2),
        evaluation=[users[count:], jokes[count:], ratings[count:]],
        guilty=Guilty("data", rows=tuple(sorted(bad.tolist()))),
        batch_size=48,
        steps=400,
    )
