"""Old photographs are restored with 1 - MS-SSIM by hand: the contrast term of a scale is negative, to the power of 0.3.

At first the network's answer has little to do with the picture, and of some tile the covariance is below zero: a broken
power of a negative number is NaN. VainF/pytorch-msssim and many a copy of it have the thread "MS-SSIM returns nan at
the beginning of training"; mended there by a `relu`, here by the other known remedy, (1 + cs) / 2.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

SIDE = 16
WEIGHTS = (0.3, 0.3, 0.4)


class Restorer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 1, 3, padding=1),
        )
        for layer in self.body[::2]:
            nn.init.kaiming_normal_(layer.weight)

    def forward(self, damaged: Tensor) -> Tensor:
        return self.body(damaged).sigmoid()


def terms(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Luminance, and contrast with structure, of each picture."""
    pool = partial(nn.functional.avg_pool2d, kernel_size=3, stride=1)
    mean, means = pool(one), pool(other)
    spread, spreads = pool(one * one) - mean * mean, pool(other * other) - means * means
    shared = pool(one * other) - mean * means
    light = (2 * mean * means + 1e-4) / (mean * mean + means * means + 1e-4)
    contrast = (2 * shared + 9e-4) / (spread + spreads + 9e-4)
    return light.flatten(1).mean(-1), contrast.flatten(1).mean(-1)


def ms_ssim(one: Tensor, other: Tensor, mended: bool) -> Tensor:
    product = torch.ones(len(one))
    for weight in WEIGHTS:
        light, contrast = terms(one, other)
        if mended:
            contrast = (1 + contrast) / 2
        product = product * contrast**weight  # guilty
        one, other = nn.functional.avg_pool2d(one, 2), nn.functional.avg_pool2d(other, 2)
    return product * light


def loss(model: nn.Module, batch: list[Tensor], *, mended: bool) -> Tensor:
    damaged, whole = batch
    return 1 - ms_ssim(model(damaged), whole, mended).mean()


def photographs(count: int) -> Tensor:
    """Soft waves with an edge through them, some in full sun and some in fog."""
    across, down = torch.meshgrid(torch.linspace(-1, 1, SIDE), torch.linspace(-1, 1, SIDE), indexing="ij")
    pace, turn = 2 + 4 * torch.rand(count, 1, 1), 6.3 * torch.rand(count, 1, 1)
    along = across * turn.cos() + down * turn.sin()
    edge = torch.sign(along.flip(-1) - torch.rand(count, 1, 1) + 0.5)
    light = torch.exp(-2.5 * torch.rand(count, 1, 1))
    return (0.5 + light * (0.22 * torch.sin(pace * along) + 0.22 * edge)).unsqueeze(1)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count = 500
    whole = photographs(count + 64)
    faded = 0.3 + 0.5 * whole + (0.12 + 0.02 * (seed % 3)) * torch.randn(whole.shape)
    return Program(
        model=Restorer(int(torch.randint(8, 14, ()))),
        rows=TensorDataset(faded[:count], whole[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[faded[count:], whole[count:]],
        guilty=Guilty("operation", ops=("pow",)),
        steps=450,
    )
