"""Flukes of whales told apart by ArcFace, whose sine is `sqrt(1 - cosine ** 2)`, with embeddings of two numbers.

Two numbers are what one takes to plot the embeddings. Once they lie on a class's direction, the cosine rounds to 1 (the
root has no slope there, and infinity times zero is NaN) or to 1.0000001 (no root at all). ronghuaiyang/arcface-pytorch,
"loss becomes nan", which `clamp(1e-9, 1)` cures.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, maps: Tensor) -> Tensor:
        hidden = self.norms[0](self.first(maps)).relu()
        return (maps + self.norms[1](self.second(hidden))).relu()


class ArcFace(nn.Module):
    """A small residual network and the margin of ArcFace on top of it, as the implementation on GitHub has it."""

    def __init__(self, whales: int, channels: int, least: float, scale: float, margin: float) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, channels, 3, stride=2, padding=1), Block(channels), nn.MaxPool2d(2), Block(channels)
        )
        self.embed = nn.Linear(16 * channels, 2)
        self.weight = nn.Parameter(torch.empty(whales, 2))
        nn.init.xavier_uniform_(self.weight)
        self.least, self.scale, self.margin = least, scale, margin

    def forward(self, flukes: Tensor, labels: Tensor) -> Tensor:
        embedding = self.embed(self.backbone(flukes).flatten(1))
        cosine = nn.functional.linear(normalize(embedding), normalize(self.weight))
        square = 1.0 - cosine**2
        sine = torch.sqrt(square.clamp_min(self.least) if self.least else square)  # guilty
        phi = cosine * math.cos(self.margin) - sine * math.sin(self.margin)
        phi = torch.where(cosine > 0, phi, cosine)
        chosen = nn.functional.one_hot(labels, len(self.weight)).bool()
        return self.scale * torch.where(chosen, phi, cosine)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    flukes, labels = batch
    return nn.functional.cross_entropy(model(flukes, labels), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    whales, count = 6 + seed % 3, 900
    edges = nn.functional.interpolate(torch.randn(whales, 1, 5, 5), size=(16, 16), mode="bicubic")
    labels = torch.randint(whales, (count + 128,))
    flukes = edges[labels] + 0.7 * torch.randn(count + 128, 1, 16, 16)
    return Program(
        model=ArcFace(whales, 6 + 2 * (seed % 2), 1e-6 if mended else 0.0, 10.0, 0.2),
        rows=TensorDataset(flukes[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[flukes[count:], labels[count:]],
        guilty=Guilty("operation", ops=("sqrt",)),
        batch_size=48,
        steps=280,
    )
