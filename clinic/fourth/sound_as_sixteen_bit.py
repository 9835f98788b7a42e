"""Recordings as scipy.io.wavfile reads them: whole numbers up to 32767, turned into floats and given to a network.

torchaudio would have divided by 32768. The first convolution answers with thousands, the logits too, and SGD's first
steps throw the weights to where nothing comes back from. The mend is the division.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from clinic.program import Guilty, Program


class Recordings(Dataset[tuple[Tensor, int]]):
    """Machines that hum at different pitches, recorded with sixteen bits."""

    def __init__(self, count: int, length: int, pitches: Tensor, scale: float) -> None:
        self.kind = torch.randint(len(pitches), (count,))
        time = torch.arange(length) / length
        phase, loud = 2 * math.pi * torch.rand(count, 1), torch.empty(count, 1).uniform_(0.2, 0.7)
        hum = torch.sin(2 * math.pi * pitches[self.kind][:, None] * time + phase)
        wave = loud * hum + 0.1 * torch.randn(count, length)
        self.samples = (wave.clamp(-1, 1) * 32767).to(torch.int16)
        self.scale = scale

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.samples[row].float()[None] / self.scale, int(self.kind[row])


class Classifier(nn.Module):
    def __init__(self, width: int, kinds: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, width, 16, stride=4),
            nn.ReLU(),
            nn.Conv1d(width, 2 * width, 8, stride=2),
            nn.ReLU(),
            nn.Conv1d(2 * width, 2 * width, 4, stride=2),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, kinds)

    def forward(self, wave: Tensor) -> Tensor:
        return self.head(self.features(wave).mean(-1))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    wave, kind = batch
    return F.cross_entropy(model(wave), kind)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    kinds, length = int(torch.randint(4, 7, ())), int(torch.randint(400, 640, ()))
    model = Classifier(int(torch.randint(12, 20, ())), kinds)
    pitches = 12.0 * torch.arange(1, kinds + 1) * (1 + 0.1 * torch.rand(kinds))
    scale = 32768.0 if mended else 1.0
    rows = Recordings(int(torch.randint(600, 900, ())), length, pitches, scale)
    held_out = Recordings(200, length, pitches, 32768.0)
    return Program(
        model=model,
        rows=rows,
        loss=loss,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9),
        evaluation=(held_out.samples.float()[:, None] / 32768, held_out.kind),
        guilty=Guilty("explosion"),
        batch_size=32,
        steps=350,
    )
