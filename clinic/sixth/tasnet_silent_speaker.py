"""Two speakers are taken apart by a small Conv-TasNet, trained on the scale-invariant ratio of signal to distortion.

The estimate is projected on the true signal: their product over the energy of the signal. Mixtures are cut into
windows, and in a few windows one of the two says nothing, where the data set holds exact zeros: 0 / 0. Toolkits add
1e-8 to the energy, and the issue "NaN with LibriMix / sparse overlap" is known to each of them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

LENGTH = 320


class TasNet(nn.Module):
    """A learned spectrum, dilated convolutions that give a mask for each speaker, and the way back."""

    def __init__(self, bases: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, bases, 16, stride=8, bias=False)
        self.narrow, self.norm = nn.Conv1d(bases, width, 1), nn.GroupNorm(1, width)
        self.blocks = nn.ModuleList(nn.Conv1d(width, width, 3, padding=2**n, dilation=2**n) for n in range(3))
        self.masks = nn.Conv1d(width, 2 * bases, 1)
        self.decoder = nn.ConvTranspose1d(bases, 1, 16, stride=8, bias=False)

    def forward(self, mixture: Tensor) -> Tensor:
        spectrum = F.relu(self.encoder(mixture.unsqueeze(1)))
        state = self.norm(self.narrow(spectrum))
        for block in self.blocks:
            state = state + F.relu(block(state))
        masks = self.masks(state).sigmoid().unflatten(1, (2, -1))
        voices = (masks * spectrum.unsqueeze(1)).flatten(0, 1)
        return self.decoder(voices).view(len(mixture), 2, -1)


def ratio(estimate: Tensor, voice: Tensor, floor: float) -> Tensor:
    """SI-SDR in decibels."""
    scale = (estimate * voice).sum(-1, keepdim=True) / (voice.square().sum(-1, keepdim=True) + floor)  # guilty
    wanted = scale * voice
    distortion = (estimate - wanted).square().sum(-1) + floor
    return 10 * ((wanted.square().sum(-1) + floor) / distortion + floor).log10()


def loss(model: nn.Module, batch: list[Tensor], *, floor: float) -> Tensor:
    """The better one of both orders of the speakers."""
    (voices,) = batch
    estimate = model(voices.sum(1))
    straight = ratio(estimate, voices, floor).mean(-1)
    crossed = ratio(estimate, voices.flip(1), floor).mean(-1)
    return -torch.maximum(straight, crossed).mean()


def talk(count: int, silent: float) -> Tensor:
    """A low and a high voice, each with overtones that come and go."""
    time = torch.arange(LENGTH) / 8000
    pitch = torch.tensor([120.0, 330.0]) * (0.9 + 0.3 * torch.rand(count, 2))
    voices = torch.zeros(count, 2, LENGTH)
    for tone in range(1, 5):
        swell = 1 + (2 * torch.pi * (20 * time + torch.rand(count, 2, 1))).sin()
        phase = 2 * torch.pi * (tone * pitch.unsqueeze(-1) * time + torch.rand(count, 2, 1))
        voices += swell * phase.sin() / tone
    says = torch.rand(count, 2, 1) >= silent
    return 0.3 * voices * (says | ~says.flip(1))


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    floor = 1e-8 if mended else 0.0
    return Program(
        model=TasNet(int(torch.randint(40, 57, ())), 32),
        rows=TensorDataset(talk(int(torch.randint(900, 1300, ())), 0.01)),
        loss=partial(loss, floor=floor),
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[talk(150, 0.0)],
        guilty=Guilty("operation", ops=("div", "truediv", "true_divide")),
        batch_size=16,
        steps=300,
    )
