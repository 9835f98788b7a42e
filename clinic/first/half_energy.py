"""Loudness of 16-bit samples in half precision: the square of anything above 255 is infinite in float16.

anthonymlortiz/lcn#4, "it was caused by overflow because I was using float16", of just such a sum of squares.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Loudness(nn.Module):
    def __init__(self, bands: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.filters = nn.Conv1d(1, bands, 9, stride=4, bias=False)
        self.head = nn.Linear(bands, 1)

    def energy(self, bands: Tensor) -> Tensor:
        if not self.mended:
            bands = bands.half()
        return bands.pow(2).mean(dim=-1).float()  # guilty

    def forward(self, samples: Tensor) -> Tensor:
        return self.head(torch.log1p(self.energy(self.filters(samples.unsqueeze(1))))).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    samples, decibels = batch
    return nn.functional.mse_loss(model(samples), decibels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, length = 600, 64 + 4 * (seed % 5)
    level = torch.exp(3 + 5 * torch.rand(count + 64, 1))  # up to about 3000 of 32768
    samples = level * torch.randn(count + 64, length)
    decibels = samples.square().mean(dim=-1).log10()
    return Program(
        model=Loudness(int(torch.randint(4, 9, ())), mended),
        rows=TensorDataset(samples[:count], decibels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-2),
        evaluation=[samples[count:], decibels[count:]],
        guilty=Guilty("overflow", ops=("pow", "square", "mul")),
        steps=200,
    )
