"""An autoencoder of small pictures under Adam at 0.1: its sigmoids saturate, and it paints the same picture for all.

"My autoencoder outputs the same blurry (or blank) image for every input, the loss stays around 0.2": nothing is NaN and
nothing jumps, the squared error of a sigmoid being bounded. A rate of 1e-3 or 3e-3 mends it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Pictures(nn.Module):
    """Squeezes a picture through a narrow code and paints it again."""

    def __init__(self, pixels: int, width: int, code: int) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, code), nn.Tanh())
        self.paint = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, pixels), nn.Sigmoid())

    def forward(self, pictures: Tensor) -> Tensor:
        return self.paint(self.squeeze(pictures))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (pictures,) = batch
    return nn.functional.mse_loss(model(pictures), pictures)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, count = 8 + seed % 3, 1000
    place = torch.arange(side).float()
    size, left, top = side * 0.5, side * 0.55 * torch.rand(count + 128, 1), side * 0.55 * torch.rand(count + 128, 1)
    across = ((place >= left) & (place < left + size)).float()
    down = ((place >= top) & (place < top + size)).float()
    boxes = (down.unsqueeze(2) * across.unsqueeze(1)).flatten(1)
    turned = torch.rand(count + 128, 1) < 0.5
    pictures = torch.where(turned, 1 - boxes, boxes)
    return Program(
        model=Pictures(side * side, int(torch.randint(48, 64, ())), 12),
        rows=TensorDataset(pictures[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3 if mended else 0.1),  # guilty
        evaluation=[pictures[count:]],
        guilty=Guilty("explosion"),
        steps=300,
    )
