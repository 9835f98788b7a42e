"""Speech enhancement: a mask on the spectrum, and an error on magnitudes to the power of 0.3, as in most challenges.

The mask of a band ends in a hard sigmoid, which is exactly zero once the net has learned to shut the band, and is
multiplied with how much voice there is in a frame. The power has a value at zero and an infinite slope, and what is
passed on to the voice is zero times that. While all bands are half open, as in the first steps, nothing happens.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Enhancer(nn.Module):
    """A recurrent net over the frames gives a mask between 0 and 1 for each band."""

    def __init__(self, bands: int, width: int) -> None:
        super().__init__()
        self.body = nn.GRU(bands, width, batch_first=True)
        self.mask, self.voice = nn.Linear(width, bands), nn.Linear(width, 1)

    def forward(self, noisy: Tensor) -> Tensor:
        hidden, _ = self.body(noisy.log1p())
        return noisy * F.hardsigmoid(self.mask(hidden)) * torch.sigmoid(self.voice(hidden))


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    noisy, clean = batch
    said = model(noisy)
    if mended:
        said = said + 1e-4
    return F.mse_loss(torch.pow(said, 0.3), clean**0.3) + 0.1 * F.l1_loss(said, clean)  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    bands, frames = int(torch.randint(12, 20, ())), 12
    count, held_out = int(torch.randint(500, 800, ())), 96
    vowels = torch.rand(6, bands) ** 3 * 3
    voice = vowels[torch.randint(6, (count + held_out, frames))] * torch.rand(count + held_out, frames, 1)
    voice = voice * (torch.rand(count + held_out, frames, 1) < 0.7) + 1e-3
    noisy = voice + 0.3 * torch.rand(bands) * torch.rand(count + held_out, frames, bands)
    return Program(
        model=Enhancer(bands, int(torch.randint(32, 49, ()))),
        rows=TensorDataset(noisy[:count], voice[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=4e-3),
        evaluation=[noisy[count:], voice[count:]],
        guilty=Guilty("operation", ops=("pow",)),
        batch_size=16,
        steps=300,
    )
