"""Clicks on advertisements by a Deep & Cross Network whose inputs are counts as they come out of the log.

Each cross layer multiplies the state with the inputs once more. Where some inputs are in the hundreds, three layers
make a logit of billions, and the first steps of SGD throw the weights away. The paper takes logarithms of the numbers;
many notebooks that copy its layers do not.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Cross(nn.Module):
    """One cross layer: the first inputs times a number that the state gives, and the state."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weigh, self.shift = nn.Linear(features, 1, bias=False), nn.Parameter(torch.zeros(features))

    def forward(self, first: Tensor, state: Tensor) -> Tensor:
        return first * self.weigh(state) + self.shift + state


class DeepAndCross(nn.Module):
    """Three cross layers beside two deep ones, over an embedding of the site and the numbers."""

    def __init__(self, sites: int, numbers: int, width: int) -> None:
        super().__init__()
        self.site = nn.Embedding(sites, 6)
        inputs = 6 + numbers
        self.cross = nn.ModuleList([Cross(inputs) for _ in range(3)])
        self.deep = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(inputs + width, 1)

    def forward(self, site: Tensor, numbers: Tensor) -> Tensor:
        first = torch.cat([self.site(site), numbers], dim=-1)
        state = first
        for layer in self.cross:
            state = layer(first, state)
        return self.head(torch.cat([state, self.deep(first)], dim=-1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    site, numbers, click = batch
    return F.binary_cross_entropy_with_logits(model(site, numbers), click)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    sites, features, width = int(torch.randint(20, 40, ())), int(torch.randint(6, 10, ())), 48
    rows, held_out = int(torch.randint(3000, 4000, ())), 800
    site, hidden = torch.randint(sites, (rows + held_out,)), torch.randn(rows + held_out, features)
    counts = (3 + 1.2 * hidden).exp().floor()
    merit = 2 * hidden[:, 0] - 2 * hidden[:, 1] + hidden[:, 2] * hidden[:, 3] + torch.randn(sites)[site]
    click = (merit > 0).float()
    numbers = ((counts + 1).log() - 3) / 1.2 if mended else counts
    return Program(
        model=DeepAndCross(sites, features, width),
        rows=TensorDataset(site[:rows], numbers[:rows], click[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.03, momentum=0.9),
        evaluation=[site[rows:], numbers[rows:], click[rows:]],
        guilty=Guilty("explosion"),
        batch_size=64,
        steps=400,
    )
