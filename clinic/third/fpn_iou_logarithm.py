"""A detector on a feature pyramid, trained by the negative logarithm of the overlap: of boxes apart there is none.

The loss of UnitBox and FCOS, for a head that tells the middle and the size of a box. Some of the first boxes lie beside
their object, and the logarithm of zero is infinite.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Pyramid(nn.Module):
    """Two levels; the coarse one is added to the fine one, and the head looks at one place of it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, channels, 3, stride=2, padding=1), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(channels, channels, 3, stride=2, padding=1), nn.ReLU())
        self.side, self.top = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 3, padding=1)
        self.head = nn.Sequential(nn.Conv2d(channels, channels, 5, padding=2), nn.ReLU(), nn.Conv2d(channels, 4, 1))

    def forward(self, pictures: Tensor, place: Tensor) -> Tensor:
        """Left, top, right and bottom side of the object, seen from a place."""
        fine = self.stem(pictures)
        pyramid = self.side(fine) + F.interpolate(self.top(self.deep(fine)), scale_factor=2.0)
        said = self.head(pyramid).flatten(2).gather(2, place.view(-1, 1, 1).expand(-1, 4, 1)).squeeze(-1)
        middle, half = 2 * said[:, :2], said[:, 2:].clamp(max=3).exp()
        return torch.cat([middle - half, middle + half], dim=-1)


def loss(model: nn.Module, batch: list[Tensor], smooth: float) -> Tensor:
    pictures, place, sides = batch
    said = model(pictures, place)
    areas = [(box[:, 2:] - box[:, :2]).prod(-1) for box in (said, sides)]
    inner = torch.minimum(said[:, 2:], sides[:, 2:]) - torch.maximum(said[:, :2], sides[:, :2])
    shared = inner.clamp(min=0).prod(-1)
    overlap = (shared + smooth) / (areas[0] + areas[1] - shared + smooth)
    return -torch.log(overlap).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, size = int(torch.randint(600, 1000, ())), 128, 16
    place = torch.stack(torch.unravel_index(torch.randint(16, (rows + held_out,)), (4, 4)), dim=-1) + 2  # of the 8 x 8
    centre = 2.0 * place + 1
    aside, half = 5 * torch.rand(rows + held_out, 2) - 2.5, 0.8 + 2.2 * torch.rand(rows + held_out, 2)
    sides = torch.cat([aside - half, aside + half], dim=-1)  # left, top, right and bottom, seen from the place
    grid = torch.arange(size) + 0.5
    down = (grid > (centre[:, :1] + sides[:, 1:2])) & (grid < (centre[:, :1] + sides[:, 3:]))
    across = (grid > (centre[:, 1:] + sides[:, :1])) & (grid < (centre[:, 1:] + sides[:, 2:3]))
    pictures = (down.unsqueeze(2) & across.unsqueeze(1)).float().unsqueeze(1)
    pictures = pictures + 0.1 * torch.randn_like(pictures)
    flat = 8 * place[:, 0] + place[:, 1]
    return Program(
        model=Pyramid(int(torch.randint(10, 17, ()))),
        rows=TensorDataset(pictures[:rows], flat[:rows], sides[:rows]),
        loss=partial(loss, smooth=0.1 if mended else 0.0),
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[pictures[rows:], flat[rows:], sides[rows:]],
        guilty=Guilty("operation", ops=("log",)),
        steps=240,
    )
