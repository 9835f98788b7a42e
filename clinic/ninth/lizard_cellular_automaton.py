"""A neural cellular automaton grows a picture from a seed: the same layer step after step, without clipping.

The authors of "Growing neural cellular automata" set the last layer to zero and bring each gradient to norm one, for a
layer that is applied again and again multiplies its slope. Left out, a rate that looks usual for SGD takes the loss to
the thousands or far beyond with its first update and to NaN soon after. Here lizards, and bars to bask on.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Automaton(nn.Module):
    """Each cell looks at its neighbours through the identity and two Sobel filters and then changes its state."""

    views: Tensor

    def __init__(self, channels: int, width: int, steps: int) -> None:
        super().__init__()
        self.steps, self.channels = steps, channels
        sobel = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 8
        stay = torch.zeros(3, 3)
        stay[1, 1] = 1.0
        self.register_buffer("views", torch.stack([stay, sobel, sobel.t()]).repeat(channels, 1, 1).unsqueeze(1))
        self.think = nn.Conv2d(3 * channels, width, 1)
        self.act = nn.Conv2d(width, channels, 1)

    def forward(self, seeds: Tensor) -> Tensor:
        cells = nn.functional.pad(seeds, (0, 0, 0, 0, 0, self.channels - seeds.shape[1]))
        for _ in range(self.steps):
            seen = nn.functional.conv2d(cells, self.views, padding=1, groups=self.channels)
            cells = cells + self.act(self.think(seen).relu())
        return cells[:, 0]


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    seeds, pictures = batch
    return nn.functional.mse_loss(model(seeds), pictures)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, count = 9 + seed % 2, 512
    down, across = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    places, kinds = torch.randint(3, side - 3, (count + 48, 2, 1, 1)), torch.randint(2, (count + 48, 1, 1))
    below, right = down - places[:, 0], across - places[:, 1]
    lizard = (below.abs() + right.abs() <= 2) & ~((below == 1) & (right == 1))
    bar = (below.abs() <= 1) & (right >= -2) & (right <= 3)
    pictures = torch.where(kinds == 0, lizard, bar).float()
    spot = ((below == 0) & (right == 0)).float()
    seeds = torch.stack([spot, spot * kinds], dim=1)
    model = Automaton(6, int(torch.randint(24, 33, ())), 7 + seed % 2)
    if mended:
        nn.init.zeros_(model.act.weight)
        nn.init.zeros_(model.act.bias)
    return Program(
        model=model,
        rows=TensorDataset(seeds[:count], pictures[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.3, momentum=0.9),  # guilty
        evaluation=[seeds[count:], pictures[count:]],
        guilty=Guilty("explosion"),
        batch_size=8,
        steps=320,
        clip=0.1 if mended else None,
    )
