"""Some stations deliver their seismograms with the bytes of each sample the other way round.

Read as they are, the floats are anything from 1e-38 to 1e38. Known from SEG-Y, MiniSEED and FITS files, which are
big-endian, read with `numpy.frombuffer` on machines that are not.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Magnitude(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(3, width, 7, stride=2, padding=3),
            nn.ReLU(),
            nn.Conv1d(width, 2 * width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv1d(2 * width, 2 * width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.AdaptiveMaxPool1d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 1),
        )

    def forward(self, waves: Tensor) -> Tensor:
        return self.layers(waves).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    waves, magnitudes = batch
    return nn.functional.smooth_l1_loss(model(waves), magnitudes)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    samples, count = 80 + 16 * (seed % 3), 1000
    magnitudes = 1 + 4 * torch.rand(count + 96)
    arrival = torch.randint(samples // 8, samples // 2, (count + 96, 1, 1))
    after = (torch.arange(samples) - arrival).clamp(min=0)
    envelope = (after > 0) * torch.exp(-after / (8.0 + 4 * torch.rand(count + 96, 1, 1)))
    pitch = 0.5 + torch.rand(count + 96, 3, 1)
    waves = magnitudes[:, None, None] * envelope * torch.sin(pitch * after) * (0.7 + 0.6 * torch.rand(count + 96, 3, 1))
    waves = waves + 0.05 * torch.randn_like(waves)
    foreign = torch.randperm(count)[: 4 + 3 * (seed % 4)].sort().values
    if not mended:
        for row in foreign.tolist():
            waves[row] = torch.from_numpy(waves[row].numpy().byteswap())
    return Program(
        model=Magnitude(int(torch.randint(8, 14, ()))),
        rows=TensorDataset(waves[:count], magnitudes[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[waves[count:], magnitudes[count:]],
        guilty=Guilty("data", rows=tuple(foreign.tolist())),
        batch_size=24,
        steps=300,
    )
