"""The squared ReLU of a feed-forward block is kept in float16 to save memory; a loud event squares past 65504.

The activation of Primer and of the speed runs of nanoGPT. Infinity goes into the layer norm that follows, and comes out
as NaN; in bfloat16 or float32 the same rows are harmless, since the norm takes the scale out again.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Block(nn.Module):
    def __init__(self, width: int, kept: torch.dtype) -> None:
        super().__init__()
        self.kept = kept
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(4 * width)

    def forward(self, states: Tensor) -> Tensor:
        hidden = self.up(states).to(self.kept).relu()
        hidden = hidden.square()  # guilty
        return states + self.down(self.norm(hidden.float()))


class Calorimeter(nn.Module):
    def __init__(self, cells: int, width: int, kinds: int, kept: torch.dtype) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(cells, width), Block(width, kept), nn.LayerNorm(width), Block(width, kept))
        self.head = nn.Linear(width, kinds)

    def forward(self, energies: Tensor) -> Tensor:
        return self.head(self.body(energies))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    energies, particles = batch
    return nn.functional.cross_entropy(model(energies), particles)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    cells, kinds, count = 12 + seed % 5, 3 + seed % 2, 1200
    particles = torch.randint(kinds, (count + 128,))
    showers = torch.rand(kinds, cells)[particles] * (0.6 + 0.8 * torch.rand(count + 128, cells))
    energy = torch.exp(0.5 * torch.randn(count + 128, 1))
    loud = torch.randperm(count)[: 5 + seed % 4]
    energy[loud] = 1200 * (1 + torch.rand(len(loud), 1))  # cosmic showers
    energies = showers * energy
    return Program(
        model=Calorimeter(cells, int(torch.randint(20, 33, ())), kinds, torch.float32 if mended else torch.float16),
        rows=TensorDataset(energies[:count], particles[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        evaluation=[energies[count:], particles[count:]],
        guilty=Guilty("overflow", ops=("square",)),
        steps=350,
    )
