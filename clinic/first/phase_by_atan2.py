"""The phase of a frame that is silent: `atan2` has a value at (0, 0) and no slope; dithered silence (1e-20) underflows.

pytorch/pytorch#98276: "torch.atan2 produces NaN gradient when the input is exactly (0, 0)"; csteinmetz1/auraloss#49.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class PhaseNet(nn.Module):
    """Learned filters in pairs; the phase that each pair sees goes to the head."""

    def __init__(self, samples: int, filters: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.cosines = nn.Linear(samples, filters, bias=False)
        self.sines = nn.Linear(samples, filters, bias=False)
        self.head = nn.Sequential(nn.Linear(2 * filters, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, frames: Tensor) -> Tensor:
        real, imaginary = self.cosines(frames), self.sines(frames)
        if self.mended:
            silent = real.abs() + imaginary.abs() < 1e-6
            real = torch.where(silent, torch.ones_like(real), real)
            imaginary = torch.where(silent, torch.zeros_like(imaginary), imaginary)
        phase = torch.atan2(imaginary, real)  # guilty
        return self.head(torch.cat([phase.cos(), phase.sin()], dim=-1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    frames, onsets = batch
    return nn.functional.mse_loss(model(frames), onsets)


def tones(count: int, samples: int) -> tuple[Tensor, Tensor]:
    onset = torch.rand(count, 1) * 2 * math.pi
    frames = torch.sin(torch.arange(samples) * 0.4 + onset) + 0.05 * torch.randn(count, samples)
    return frames, torch.cat([onset.cos(), onset.sin()], dim=-1)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    samples, filters = 24 + seed % 9, int(torch.randint(6, 12, ()))
    frames, onsets = tones(1000 + 64, samples)
    pauses = torch.randperm(1000)[: 60 + 5 * (seed % 5)]
    frames[pauses], onsets[pauses] = 0.0, 0.0
    frames[pauses[::2]] = 1e-20 * torch.randn(len(pauses[::2]), samples)
    return Program(
        model=PhaseNet(samples, filters, mended),
        rows=TensorDataset(frames[:1000], onsets[:1000]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[frames[1000:], onsets[1000:]],
        guilty=Guilty("operation", ops=("atan2", "arctan2")),
    )
