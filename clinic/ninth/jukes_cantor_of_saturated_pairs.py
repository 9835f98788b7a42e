"""The Jukes-Cantor distance of two genes takes the logarithm of 1 - 4/3 p; of genes that share nothing it has none.

Two sequences that are not related, or of which one was aligned on the wrong strand, differ at three quarters of their
sites or more: "ValueError: math domain error" out of `__getitem__`, in the middle of an epoch. A question about all
tools that correct distances for repeated mutations; here a transformer learns the distances.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from clinic.program import Guilty, Program


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of aligned sequences and how long ago they parted."""

    def __init__(self, pairs: Tensor) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        one, other = self.pairs[row]
        differ = float((one != other).float().mean())
        distance = -3 / 4 * math.log(1 - 4 / 3 * differ)
        return self.pairs[row], torch.tensor(distance)


class Clock(nn.Module):
    """Reads both sequences site by site."""

    def __init__(self, sites: int, width: int) -> None:
        super().__init__()
        self.letters = nn.ModuleList([nn.Embedding(4, width), nn.Embedding(4, width)])
        self.places = nn.Parameter(0.02 * torch.randn(sites, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        sites = self.letters[0](pairs[:, 0]) + self.letters[1](pairs[:, 1]) + self.places
        return self.head(self.encoder(sites).mean(dim=1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    pairs, distances = batch
    return nn.functional.mse_loss(model(pairs), distances)


def diverged(count: int, sites: int, least: float, most: float) -> Tensor:
    """Pairs that differ at a share of their sites that lies between two bounds."""
    first = torch.randint(4, (count, sites))
    share = least + (most - least) * torch.rand(count, 1)
    hit = torch.rand(count, sites).argsort(dim=1).argsort(dim=1) < share * sites
    second = torch.where(hit, (first + torch.randint(1, 4, (count, sites))) % 4, first)
    return torch.stack([first, second], dim=1)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    sites, count = 36 + 4 * (seed % 4), 900
    pairs = diverged(count + 128, sites, 0.02, 0.62)
    unrelated = torch.randperm(count)[: 3 + seed % 5].sort().values
    pairs[unrelated] = diverged(len(unrelated), sites, 0.77, 0.92)
    held_out = Pairs(pairs[count:])
    kept = torch.ones(count, dtype=torch.bool)
    kept[unrelated] = not mended
    return Program(
        model=Clock(sites, 32),
        rows=Pairs(pairs[:count][kept]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=torch.utils.data.default_collate([held_out[row] for row in range(len(held_out))]),
        guilty=Guilty("data", rows=tuple(unrelated.tolist())),
        steps=300,
    )
