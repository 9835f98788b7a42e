"""A factorisation machine on the counts in a shopping basket, by SGD at a rate that suits a linear model.

The products of pairs grow with the square of the counts, and with them the gradient: users of libFM, fastFM and xLearn
report "nan in the first iteration" and are told to lower the learning rate.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class FactorisationMachine(nn.Module):
    def __init__(self, items: int, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(items, 1)
        self.factors = nn.Parameter(0.1 * torch.randn(items, rank))

    def forward(self, baskets: Tensor) -> Tensor:
        pairs = (baskets @ self.factors) ** 2 - baskets**2 @ self.factors**2
        return self.linear(baskets).squeeze(-1) + 0.5 * pairs.sum(dim=-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    baskets, spent = batch
    return nn.functional.mse_loss(model(baskets), spent)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    items, count = 20 + 2 * (seed % 4), 1500
    baskets = torch.poisson(torch.full((count + 128, items), 0.5))
    truth = FactorisationMachine(items, 4)
    with torch.no_grad():
        truth.linear.weight.normal_(std=0.3)
        spent = truth(baskets) + 0.1 * torch.randn(count + 128)
        spent = (spent - spent.mean()) / spent.std()
    return Program(
        model=FactorisationMachine(items, int(torch.randint(4, 9, ()))),
        rows=TensorDataset(baskets[:count], spent[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=5e-3 if mended else 0.1 + 0.05 * (seed % 3), momentum=0.9),
        evaluation=[baskets[count:], spent[count:]],
        guilty=Guilty("explosion"),
        steps=500,
    )
