"""A DDSP synthesizer removes harmonics above half the sampling rate, and shares the loudness out among those that stay.

For frames without a pitch the tracker gives its highest bin, 2006 Hz. At 4 kHz that leaves no harmonic at all, and the
amplitudes are divided by their sum, 0 / 0. "NaN in harmonic distribution" with high notes or a low sampling rate, in
several ports of DDSP; magenta's own `safe_divide` has an epsilon.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

RATE, SAMPLES = 4000, 400


class Violin(nn.Module):
    """Loudness and timbre from how the bow is moved, and a sum of sines from these."""

    def __init__(self, features: int, width: int, harmonics: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.body = nn.Sequential(nn.Linear(features, width), nn.LeakyReLU(), nn.Linear(width, width), nn.LeakyReLU())
        self.timbre, self.loudness = nn.Linear(width, harmonics), nn.Linear(width, 1)
        self.register_buffer("order", torch.arange(1, harmonics + 1).float(), persistent=False)
        self.register_buffer("clock", torch.arange(SAMPLES) / RATE, persistent=False)

    def forward(self, bow: Tensor, pitch: Tensor) -> Tensor:
        hidden = self.body(bow)
        tones = pitch.unsqueeze(-1) * self.order
        shares = 2 * torch.sigmoid(self.timbre(hidden)) ** math.log(10) + 1e-7
        shares = shares * (tones < RATE / 2).float()
        whole = shares.sum(-1, keepdim=True)
        if self.mended:
            whole = whole.clamp(min=1e-7)
        shares = shares / whole  # guilty
        amplitudes = nn.functional.softplus(self.loudness(hidden)) * shares
        waves = torch.sin(2 * math.pi * tones.unsqueeze(-1) * self.clock)
        return (amplitudes.unsqueeze(-1) * waves).sum(1)


def spectrum(audio: Tensor) -> Tensor:
    return torch.fft.rfft(audio * torch.hann_window(SAMPLES)).abs()


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    bow, pitch, recorded = batch
    return (spectrum(model(bow, pitch)) - spectrum(recorded)).abs().mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, harmonics, count = 5 + seed % 3, 10 + 2 * (seed % 3), 800
    rows = count + 96
    bow = torch.randn(rows, features)
    pitch = 196 * 2 ** (1.8 * torch.rand(rows))
    order = torch.arange(1, harmonics + 1)
    brightness = 1.2 + 0.8 * torch.tanh(bow @ torch.randn(features))
    colour = torch.sigmoid(bow @ torch.randn(features, harmonics))
    tones = pitch.unsqueeze(-1) * order
    amplitudes = colour * order ** -brightness.unsqueeze(-1) * (tones < RATE / 2)
    amplitudes = amplitudes * torch.exp(0.5 * bow[:, :1])
    waves = torch.sin(2 * math.pi * tones.unsqueeze(-1) * torch.arange(SAMPLES) / RATE)
    recorded = (amplitudes.unsqueeze(-1) * waves).sum(1)
    scratched = torch.randperm(count)[: 6 + seed % 5]
    pitch[scratched] = 2006.0
    recorded[scratched] = 0.02 * torch.randn(len(scratched), SAMPLES)
    return Program(
        model=Violin(features, int(torch.randint(32, 57, ())), harmonics, mended),
        rows=TensorDataset(bow[:count], pitch[:count], recorded[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[bow[count:], pitch[count:], recorded[count:]],
        guilty=Guilty("operation", ops=("div", "truediv", "true_divide")),
        steps=2000,
    )
