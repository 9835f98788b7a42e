"""Speech is freed from noise by a mask on its spectrogram, and compared after a compression by the power 0.3.

The compression is usual, since the ear hears so. The mask is a hard sigmoid, for a chip, and as the network learns
where nothing is said the mask becomes exactly zero: there the power has an infinite slope, times an error of zero.
The gate for voice gets the NaN. It takes a few steps before the first one.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

FRAME = 64


class Mask(nn.Module):
    """A bidirectional GRU over the frames: a mask of bands, times whether there is a voice at all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        bands = FRAME // 2 + 1
        self.body = nn.GRU(bands, width, batch_first=True, bidirectional=True)
        self.head, self.voice = nn.Linear(2 * width, bands), nn.Linear(2 * width, 1)

    def forward(self, loudness: Tensor) -> Tensor:
        states, _ = self.body(loudness.log1p())
        return F.hardsigmoid(2 * self.head(states)) * (self.voice(states) + 1).sigmoid()


def loudness(wave: Tensor) -> Tensor:
    return torch.stft(wave, FRAME, window=torch.hann_window(FRAME), return_complex=True).abs().mT


def loss(model: nn.Module, batch: list[Tensor], floor: float) -> Tensor:
    noisy, clean = (loudness(wave) for wave in batch)
    heard = model(noisy) * noisy
    return F.mse_loss((heard + floor).pow(0.3), (clean + floor).pow(0.3))  # guilty


def recordings(count: int, length: int) -> tuple[Tensor, Tensor]:
    """Voiced stretches between pauses, and a noise whose loudness differs."""
    time = torch.arange(length)
    pitch = 0.1 + 0.3 * torch.rand(count, 1)
    clean = sum((pitch * order * time).sin() / order for order in range(1, 5))
    begins, ends = length * 0.4 * torch.rand(count, 1), length * (0.6 + 0.4 * torch.rand(count, 1))
    clean = clean * ((time > begins) & (time < ends))
    return clean + (0.2 + 0.5 * torch.rand(count, 1)) * torch.randn(count, length), clean


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    length = FRAME * int(torch.randint(7, 10, ()))
    data, held_out = recordings(int(torch.randint(600, 900, ())), length), recordings(128, length)
    return Program(
        model=Mask(int(torch.randint(24, 40, ()))),
        rows=TensorDataset(*data),
        loss=partial(loss, floor=1e-3 if mended else 0.0),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=list(held_out),
        guilty=Guilty("operation", ops=("pow",)),
        batch_size=16,
        steps=300,
    )
