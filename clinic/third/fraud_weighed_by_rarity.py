"""Cases of fraud weigh as many times more as they are rarer, and the rate is the one that was right without weights.

`pos_weight` of some hundreds in `binary_cross_entropy_with_logits`, with SGD and momentum. The first batch that holds a
fraud makes a step that is longer than all weights, and the next one answers it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Payments(nn.Module):
    """An embedding of the shop beside the numbers, and three layers."""

    def __init__(self, shops: int, numbers: int, width: int) -> None:
        super().__init__()
        self.shop = nn.Embedding(shops, 6)
        self.body = nn.Sequential(
            nn.Linear(6 + numbers, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, shop: Tensor, numbers: Tensor) -> Tensor:
        return self.body(torch.cat([self.shop(shop), numbers], dim=-1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor], rarity: Tensor) -> Tensor:
    shop, numbers, fraud = batch
    return F.binary_cross_entropy_with_logits(model(shop, numbers), fraud, pos_weight=rarity)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    shops, features, width = int(torch.randint(10, 20, ())), int(torch.randint(6, 10, ())), 48
    rows, held_out = int(torch.randint(6000, 9000, ())), 2000
    shop, numbers = torch.randint(shops, (rows + held_out,)), torch.randn(rows + held_out, features)
    merit = numbers[:, 0] + numbers[:, 1] + 0.5 * torch.randn(shops)[shop] + 0.3 * torch.randn(rows + held_out)
    fraud = (merit > merit.quantile(0.995)).float()
    rarity = (1 - fraud[:rows]).sum() / fraud[:rows].sum()
    return Program(
        model=Payments(shops, features, width),
        rows=TensorDataset(shop[:rows], numbers[:rows], fraud[:rows]),
        loss=partial(loss, rarity=rarity),
        optimizer=partial(torch.optim.SGD, lr=0.003 if mended else 0.3, momentum=0.9),
        evaluation=[shop[rows:], numbers[rows:], fraud[rows:]],
        guilty=Guilty("explosion"),
        batch_size=64,
        steps=400,
    )
