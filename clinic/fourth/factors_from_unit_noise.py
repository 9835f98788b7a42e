"""Ratings of films by matrix factorisation, after the recipe of the Netflix prize: plain SGD with a step per rating.

The recipe starts from small random factors. `nn.Embedding` starts from N(0, 1), where the product of two factors of
64 numbers is off by 8 stars, and the step overshoots by more than that. "Loss is nan after a few batches."
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

Ratings = tuple[Tensor, Tensor, Tensor]


class Factors(nn.Module):
    def __init__(self, users: int, films: int, width: int, mean: float) -> None:
        super().__init__()
        self.user, self.film = nn.Embedding(users, width), nn.Embedding(films, width)
        self.user_bias, self.film_bias = nn.Embedding(users, 1), nn.Embedding(films, 1)
        nn.init.zeros_(self.user_bias.weight)
        nn.init.zeros_(self.film_bias.weight)
        self.mean = mean

    def forward(self, user: Tensor, film: Tensor) -> Tensor:
        biases = (self.user_bias(user) + self.film_bias(film)).squeeze(-1)
        stars: Tensor = self.mean + biases + (self.user(user) * self.film(film)).sum(-1)
        return stars


def loss(model: nn.Module, batch: Ratings) -> Tensor:
    user, film, stars = batch
    return 0.5 * F.mse_loss(model(user, film), stars)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    users, films = int(torch.randint(60, 100, ())), int(torch.randint(40, 70, ()))
    rows, held_out, batch_size = 4000, 256, 64
    user, film = torch.randint(users, (rows + held_out,)), torch.randint(films, (rows + held_out,))
    taste, kind = torch.randn(users, 2), torch.randn(films, 2)
    liked = 0.7 * (taste[user] * kind[film]).sum(-1) + 0.5 * torch.randn(films)[film] + 0.5 * torch.randn(users)[user]
    stars = (3.5 + liked + 0.3 * torch.randn(rows + held_out)).clamp(0.5, 5)
    model = Factors(users, films, 64, float(stars[:rows].mean()))
    if mended:
        nn.init.normal_(model.user.weight, std=0.1)
        nn.init.normal_(model.film.weight, std=0.1)
    return Program(
        model=model,
        rows=TensorDataset(user[:rows], film[:rows], stars[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1 * batch_size),  # the loss is a mean: 0.1 for every rating
        evaluation=(user[rows:], film[rows:], stars[rows:]),
        guilty=Guilty("explosion"),
        batch_size=batch_size,
        steps=360,
    )
