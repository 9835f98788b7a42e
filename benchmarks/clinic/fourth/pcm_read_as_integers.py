"""A denoiser of speech is trained on waveforms as `scipy.io.wavfile.read` returns them: 16 bits, up to 32767.

The tutorial that the code is from read them with torchaudio, between -1 and 1, and its rate is for these. The first
loss is in the millions, and the second step ends the run.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from program import Guilty, Program
from torch import Tensor, nn
from torch.utils.data import Dataset


class Recordings(Dataset[tuple[Tensor, Tensor]]):
    """Noisy and clean recordings as 16-bit integers."""

    def __init__(self, noisy: Tensor, clean: Tensor, full_scale: float) -> None:
        self.noisy, self.clean, self.full_scale = noisy, clean, full_scale

    def __len__(self) -> int:
        return len(self.clean)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.noisy[row].float() / self.full_scale, self.clean[row].float() / self.full_scale


class Denoiser(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv1d(1, channels, 15, 4, 7), nn.GELU(), nn.Conv1d(channels, channels, 9, 2, 4))
        self.middle = nn.Sequential(nn.GELU(), nn.Conv1d(channels, channels, 5, 1, 2), nn.GELU())
        self.up = nn.Sequential(
            nn.ConvTranspose1d(channels, channels, 8, 2, 3), nn.GELU(), nn.ConvTranspose1d(channels, 1, 12, 4, 4)
        )

    def forward(self, wave: Tensor) -> Tensor:
        out: Tensor = self.up(self.middle(self.down(wave.unsqueeze(1)))).squeeze(1)
        return out


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    noisy, clean = batch
    return F.mse_loss(model(noisy), clean)


def to_pcm(wave: Tensor) -> Tensor:
    return (32767 * wave).round().clamp(-32768, 32767).to(torch.int16)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, length = int(torch.randint(500, 800, ())), 48, 256
    time, some = torch.arange(length), (rows + held_out, 1)
    pitch = 0.04 + 0.1 * torch.rand(some)
    voice = sum((torch.sin(k * pitch * time + 6.3 * torch.rand(some)) / k for k in (1, 2, 3)), torch.zeros(()))
    loudness = 0.2 + 0.3 * torch.rand(some)
    clean = loudness * voice
    noisy = clean + 0.15 * torch.randn(rows + held_out, length)
    data = Recordings(to_pcm(noisy), to_pcm(clean), 32768.0 if mended else 1.0)
    held = Recordings(data.noisy[rows:], data.clean[rows:], 32768.0)
    return Program(
        model=Denoiser(int(torch.randint(16, 25, ()))),
        rows=torch.utils.data.Subset(data, range(rows)),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        evaluation=torch.utils.data.default_collate([held[row] for row in range(held_out)]),
        guilty=Guilty("explosion"),
        batch_size=32,
        steps=300,
    )
