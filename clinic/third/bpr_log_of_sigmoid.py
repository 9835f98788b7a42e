"""Bayesian personalised ranking as in its paper, the logarithm of a sigmoid, over embeddings as PyTorch draws them.

With some hundred dimensions of variance one, the scores of two items differ by dozens before anything is learned. A
pair that is wrong by 89 has a sigmoid of exactly zero.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class MatrixFactorisation(nn.Module):
    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.popular = nn.Embedding(items, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user(user) * self.item(item)).sum(-1) + self.popular(item).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    user, bought, other = batch
    ahead = model(user, bought) - model(user, other)
    if mended:
        return -F.logsigmoid(ahead).mean()
    return -torch.log(torch.sigmoid(ahead)).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    users, items, width = int(torch.randint(50, 80, ())), int(torch.randint(40, 60, ())), 800
    rows, held_out, tastes = int(torch.randint(5000, 7000, ())), 512, 4
    user = torch.randint(users, (rows + held_out,))
    taste_of, kind_of = torch.randint(tastes, (users,)), torch.randint(tastes, (items,))
    liked = [(kind_of == taste).nonzero().flatten() for taste in range(tastes)]
    others = [(kind_of != taste).nonzero().flatten() for taste in range(tastes)]

    def one_of(which: list[Tensor]) -> Tensor:
        return torch.stack([group[torch.randint(len(group), ())] for group in (which[t] for t in taste_of[user])])

    bought, other = one_of(liked), one_of(others)
    return Program(
        model=MatrixFactorisation(users, items, width),
        rows=TensorDataset(user[:rows], bought[:rows], other[:rows]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=2e-2),
        evaluation=[user[rows:], bought[rows:], other[rows:]],
        guilty=Guilty("operation", ops=("log", "sigmoid")),
        batch_size=256,
        steps=200,
    )
