"""Sea temperatures in finer resolution by a VDSR: the rate of the paper, without the clipping of the paper.

VDSR is trained by SGD at a rate of 0.1, with a momentum of 0.9, which its authors can only afford because they clip
gradients in proportion to the rate. Without that line the deep stack of convolutions explodes within its first updates.
Asked about every implementation of it: "loss becomes nan after a few iterations with lr 0.1".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class VDSR(nn.Module):
    """Many convolutions without normalisation, that add what the interpolation lacks."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.ReLU()]
        for _ in range(depth - 2):
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 1, 3, padding=1, bias=False))
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=(2.0 / (9 * layer.out_channels)) ** 0.5)

    def forward(self, coarse: Tensor) -> Tensor:
        return coarse + self.layers(coarse)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    coarse, fine = batch
    return 0.5 * (model(coarse) - fine).square().sum(dim=(1, 2, 3)).mean()  # as in the paper: a sum over pixels


def fronts(count: int, side: int) -> Tensor:
    """Tiles of the sea's surface: warm and cold water that meet along wavy fronts."""
    down, across = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    turn = 6.28 * torch.rand(count, 1, 1)
    along = (
        down * turn.sin()
        + across * turn.cos()
        - side * (0.4 + 0.2 * torch.rand(count, 1, 1)) * (turn.sin() + turn.cos())
    )
    waves = 1.2 * torch.sin(0.6 * (down * turn.cos() - across * turn.sin()) + 6.28 * torch.rand(count, 1, 1))
    return torch.where(along + waves > 0, 2.0, -2.0).unsqueeze(1) + 0.05 * torch.randn(count, 1, side, side)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, factor, count, rate = 12, 2 + seed % 2, 320, 0.1
    fine = fronts(count + 48, side)
    coarse = functional.interpolate(functional.avg_pool2d(fine, factor), size=(side, side), mode="bicubic")
    return Program(
        model=VDSR(int(torch.randint(8, 12, ())), 10 + seed % 3),
        rows=TensorDataset(coarse[:count], fine[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=rate, momentum=0.9, weight_decay=1e-4),
        evaluation=[coarse[count:], fine[count:]],
        guilty=Guilty("explosion"),
        batch_size=16,
        steps=240,
        clip=0.04 / rate if mended else None,
    )
