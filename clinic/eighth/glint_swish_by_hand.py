"""Swish written as `x / (1 + exp(-x))`: its value is right everywhere, its gradient is 0 * inf below minus 88.

A small EfficientNet for satellite tiles. Sun glint on water makes a few tiles forty times as bright as the rest, and
after the stem, which has no norm, some of their pixels are that far below zero.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Swish(nn.Module):
    def __init__(self, mended: bool) -> None:
        super().__init__()
        self.mended = mended

    def forward(self, x: Tensor) -> Tensor:
        if self.mended:
            return nn.functional.silu(x)
        return x / (1 + torch.exp(-x))  # guilty


class InvertedBottleneck(nn.Module):
    def __init__(self, channels: int, mended: bool) -> None:
        super().__init__()
        wide = 3 * channels
        self.body = nn.Sequential(
            nn.Conv2d(channels, wide, 1),
            nn.GroupNorm(1, wide),
            Swish(mended),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide),
            nn.GroupNorm(1, wide),
            Swish(mended),
            nn.Conv2d(wide, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class EfficientNet(nn.Module):
    def __init__(self, bands: int, channels: int, classes: int, mended: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(bands, channels, 3, stride=2, padding=1), Swish(mended))
        self.blocks = nn.Sequential(InvertedBottleneck(channels, mended), InvertedBottleneck(channels, mended))
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, tiles: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(tiles)).mean(dim=(2, 3))))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    tiles, labels = batch
    return nn.functional.cross_entropy(model(tiles), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    bands, classes, side, count = 3 + seed % 2, 4, 12, 600
    labels = torch.randint(classes, (count + 96,))
    spectra = torch.randn(classes, bands)
    tiles = spectra[labels][:, :, None, None] + torch.randn(count + 96, bands, side, side)
    glint = torch.randperm(count)[: 8 + 2 * (seed % 3)]
    shine = torch.rand(len(glint), 1, side, side) > 0.7
    tiles[glint] = torch.where(shine, 250 * torch.randn(len(glint), bands, 1, 1), tiles[glint])
    return Program(
        model=EfficientNet(bands, int(torch.randint(8, 14, ())), classes, mended),
        rows=TensorDataset(tiles[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[tiles[count:], labels[count:]],
        guilty=Guilty("overflow", ops=("exp",)),
        steps=220,
    )
