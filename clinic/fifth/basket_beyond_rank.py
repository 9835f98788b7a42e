"""Which goods are bought together, by a determinantal point process of low rank, and a few very full baskets.

The chance of a basket is the determinant of a matrix whose rank is the width of the embeddings. A basket with more
goods than that has a determinant of zero, which rounding makes a little positive or negative: the logarithm is NaN or
its slope enormous. Known from public code for low-rank processes on retail data.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Baskets(nn.Module):
    """An embedding for each good; its products say how alike two goods are."""

    def __init__(self, goods: int, rank: int, floor: float) -> None:
        super().__init__()
        self.goods, self.floor = nn.Embedding(goods, rank), floor
        nn.init.normal_(self.goods.weight, std=rank**-0.5)

    def forward(self, basket: Tensor, there: Tensor) -> Tensor:
        """Return the logarithm of a basket's chance."""
        taken = self.goods(basket) * there.unsqueeze(-1)
        alike = taken @ taken.mT + torch.diag_embed(1 - there) + self.floor * torch.diag_embed(there)
        every = self.goods.weight.mT @ self.goods.weight
        return torch.logdet(alike) - torch.logdet(every + torch.eye(len(every)))  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return -model(*batch).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rank, longest = int(torch.randint(8, 11, ())), 14
    kinds, each = 12, int(torch.randint(8, 12, ()))
    rows, held_out = int(torch.randint(1500, 2500, ())), 300
    liked = torch.randn(each).exp()
    kind = torch.rand(rows + held_out, kinds + 2).argsort(-1)[:, :longest] % kinds
    basket = kind * each + torch.multinomial(liked.expand(rows + held_out, -1), longest, replacement=True)
    size = torch.randint(2, rank - 2, (rows + held_out, 1))
    size[torch.rand(rows + held_out) < 0.02] = longest - 2
    size[rows:] = size[rows:].clamp(max=rank - 1)
    there = (torch.arange(longest) < size).float()
    return Program(
        model=Baskets(kinds * each, rank, floor=0.05 if mended else 0.0),
        rows=TensorDataset(basket[:rows], there[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[basket[rows:], there[rows:]],
        guilty=Guilty("operation", ops=("logdet",)),
        steps=300,
    )
