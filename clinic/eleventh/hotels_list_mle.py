"""ListMLE for hotels: the logarithm of a reversed cumulated sum of exponentials, without the greatest score taken off.

Prices go in as they are, in hundreds of euros, and a few searches contain a villa for a hundred times the usual. Its
score is beyond 88, exp is infinite, and infinity less infinity is the loss of that list. The line is in many
repositories of ranking losses; issues say "ListMLE gives NaN after some batches".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Scorer(nn.Module):
    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 1))
        self.wide = nn.Linear(features, 1)

    def forward(self, hotels: Tensor) -> Tensor:
        return (self.deep(hotels) + self.wide(hotels)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    hotels, liking = batch
    order = liking.argsort(dim=1, descending=True)
    scores = model(hotels).gather(1, order)
    if mended:
        rest = torch.logcumsumexp(scores.flip(1), 1).flip(1)
    else:
        rest = torch.log(torch.exp(scores).flip(1).cumsum(1).flip(1))  # guilty
    return (rest - scores).sum(1).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, hotels, features = int(torch.randint(800, 1000, ())), 128, 8, 5
    taste = torch.randn(features)
    shown = torch.randn(rows + held_out, hotels, features)
    shown[..., 0] = torch.exp(0.4 * torch.randn(rows + held_out, hotels))  # the price, in hundreds
    villas = torch.randperm(rows)[: int(torch.randint(8, 14, ()))]
    shown[villas, 0, 0] = torch.empty(len(villas)).uniform_(250, 500)
    value = shown @ taste.abs().clamp(min=0.4) - 0.4 * shown[..., 1] * shown[..., 2]
    liking = 2 * value + torch.randn(value.shape)
    return Program(
        model=Scorer(features, int(torch.randint(16, 33, ()))),
        rows=TensorDataset(shown[:rows], liking[:rows]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[shown[rows:], liking[rows:]],
        guilty=Guilty("overflow", ops=("exp",)),
    )
