"""VICReg wants a spread of one of each unit, by the root of its variance: where no title woke a unit, it has no slope.

`torch.sqrt(z.var(0))` without the epsilon of the paper, behind an expander that ends in a gate, relu(a) * b. The loss
is finite when it happens: the hinge is 1, its slope infinity times zero.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Titles(nn.Module):
    """Embeds the words of a title and expands what comes out."""

    def __init__(self, words: int, width: int, units: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(words, width, mode="mean")
        self.expander = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 2 * units))

    def forward(self, titles: Tensor) -> Tensor:
        gate, value = self.expander(self.words(titles)).chunk(2, -1)
        return torch.relu(gate) * value


def spread(seen: Tensor, mended: bool) -> Tensor:
    variance = seen.var(0)
    if mended:
        variance = variance + 1e-4
    return torch.sqrt(variance)  # guilty


def covariance(seen: Tensor) -> Tensor:
    centred = seen - seen.mean(0)
    products = centred.T @ centred / (len(seen) - 1)
    return (products.pow(2).sum() - products.diagonal().pow(2).sum()) / seen.shape[1]


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    one, other = model(batch[0]), model(batch[1])
    agree = nn.functional.mse_loss(one, other)
    hinge = torch.relu(1 - spread(one, mended)).mean() + torch.relu(1 - spread(other, mended)).mean()
    return 25 * agree + 12.5 * hinge + covariance(one) + covariance(other)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    topics, each, length, count = 12 + seed % 4, 9, 12, 1600
    size = count + 128
    topic = torch.multinomial(0.6 ** torch.arange(topics), size, replacement=True).unsqueeze(-1)
    views = [topic * each + torch.randint(each, (size, length)) for _ in range(2)]
    stray = [torch.randint(topics * each, (size, length)) for _ in range(2)]
    views = [torch.where(torch.rand(size, length) < 0.15, out, view) for view, out in zip(views, stray, strict=True)]
    return Program(
        model=Titles(topics * each, 32, int(torch.randint(28, 37, ()))),
        rows=TensorDataset(views[0][:count], views[1][:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=4e-3),
        evaluation=[views[0][count:], views[1][count:]],
        guilty=Guilty("operation", ops=("sqrt",)),
        batch_size=32,
        steps=700,
    )
