"""Lesions of the skin by a small U-Net, with the focal Tversky loss as in its paper: one minus the index to a power.

The power is three quarters, and its slope at zero is infinite. As soon as one photo is matched to the last digit, as
those without a lesion are, the index is one, and the gradient infinity times zero. People find it when the loss has
begun to fall, some dozens of updates in, and is NaN from one batch to the next.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

SIZE = 16


class UNet(nn.Module):
    """One way down and one way up, with norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.out = nn.Conv2d(2 * width, 1, 1)

    def forward(self, photo: Tensor) -> Tensor:
        down = self.down(photo)
        deep = self.deep(F.max_pool2d(down, 2))
        return self.out(torch.cat([down, F.relu(self.up(deep))], 1)).sigmoid()


def loss(model: nn.Module, batch: list[Tensor], least: float) -> Tensor:
    photo, mask = batch
    said = model(photo)
    both = (said * mask).sum((1, 2, 3))
    missed, invented = ((1 - said) * mask).sum((1, 2, 3)), (said * (1 - mask)).sum((1, 2, 3))
    index = (both + 1) / (both + 0.7 * missed + 0.3 * invented + 1)
    return ((1 - index).clamp(min=least) ** 0.75).mean()  # guilty


def photos(count: int) -> tuple[Tensor, Tensor]:
    """Brown ellipses on skin; some photos show healthy skin."""
    grid = torch.arange(SIZE) + 0.5
    middle, radius = torch.empty(2, count, 1, 1).uniform_(5, 11), torch.empty(2, count, 1, 1).uniform_(2, 5)
    far = ((grid[:, None] - middle[0]) / radius[0]).square() + ((grid - middle[1]) / radius[1]).square()
    mask = ((far < 1) & (torch.rand(count, 1, 1) < 0.7)).float().unsqueeze(1)
    skin, lesion = torch.tensor([0.9, 0.7, 0.6]), torch.tensor([0.35, 0.2, 0.15])
    photo = skin[:, None, None] * (1 - mask) + lesion[:, None, None] * mask
    photo = photo * (0.8 + 0.4 * torch.rand(count, 1, 1, 1)) + 0.05 * torch.randn(count, 3, SIZE, SIZE)
    return photo, mask


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    data, held_out = photos(int(torch.randint(500, 800, ()))), photos(100)
    return Program(
        model=UNet(int(torch.randint(12, 17, ()))),
        rows=TensorDataset(*data),
        loss=partial(loss, least=1e-6 if mended else 0.0),
        optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.9),
        evaluation=list(held_out),
        guilty=Guilty("operation", ops=("pow",)),
        batch_size=16,
        steps=560,
    )
