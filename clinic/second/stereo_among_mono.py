"""A few clips of a collection are stereo or a little short, and a batch that holds one cannot be stacked.

Audio from many sources: `default_collate` raises for the whole batch and does not tell which row it was.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from clinic.program import Guilty, Program


class Clips(torch.utils.data.Dataset):
    """Waveforms of shape (channels, samples) and the instrument that plays."""

    def __init__(self, waves: list[Tensor], instruments: Tensor) -> None:
        self.waves, self.instruments = waves, instruments

    def __len__(self) -> int:
        return len(self.waves)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.waves[row], self.instruments[row]


class Listener(nn.Module):
    """Classifies by the logarithm of the spectrum."""

    def __init__(self, samples: int, width: int, instruments: int) -> None:
        super().__init__()
        self.window = torch.hann_window(samples)
        self.norm = nn.LayerNorm(samples // 2 + 1)
        self.head = nn.Sequential(nn.Linear(samples // 2 + 1, width), nn.ReLU(), nn.Linear(width, instruments))

    def forward(self, waves: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(waves.mean(1) * self.window).abs()
        return self.head(self.norm(spectrum.log1p()))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    waves, instruments = batch
    return nn.functional.cross_entropy(model(waves), instruments, label_smoothing=0.05)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    samples, instruments, total = 128, int(torch.randint(4, 8, ())), int(torch.randint(500, 900, ()))
    instrument = torch.randint(instruments, (total + 128,))
    overtones = torch.rand(instruments, 5)
    pitch = 3 + 3 * torch.rand(total + 128, 1, 1)
    time = torch.linspace(0, 1, samples)
    partials = torch.sin(2 * math.pi * pitch * torch.arange(1, 6).view(1, 5, 1) * time)
    waves = list(torch.einsum("bo,bot->bt", overtones[instrument], partials).unsqueeze(1))
    waves = [wave + 0.3 * torch.randn_like(wave) for wave in waves]
    rotten = sorted(torch.randperm(total)[: int(torch.randint(2, 5, ()))].tolist())
    if not mended:
        for count, row in enumerate(rotten):
            waves[row] = waves[row].expand(2, -1) if count % 2 == 0 else waves[row][:, : samples - 7]
    return Program(
        model=Listener(samples, int(torch.randint(32, 64, ())), instruments),
        rows=Clips(waves[:total], instrument[:total]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.01),
        evaluation=[torch.stack(waves[total:]), instrument[total:]],
        guilty=Guilty("data", rows=tuple(rotten)),
    )
