"""Which of several calls a bird began with, by a diagonal state-space layer over the envelope of a recording.

The layer sums up all frames, each with a decay to the power of its age. The decays are plain weights a little below 1,
and nothing keeps them there: to remember the first call they grow, the slope of a to the power of 600 is steep, and
after a few updates of SGD one is 1.2 or more, whose power is beyond float32. The papers (S4D, LRU) keep the decay below
1 by a parametrisation; reimplementations drop it as a detail.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

CALLS, BANDS = 4, 6


class StateSpace(nn.Module):
    """Real states that decay, each with an input of its own, read at the end of the recording."""

    def __init__(self, states: int, bounded: bool) -> None:
        super().__init__()
        self.inside = nn.Linear(BANDS, states)
        self.decay = nn.Parameter(torch.empty(states).uniform_(0.97, 0.999))
        self.read = nn.Sequential(nn.Linear(states, 32), nn.GELU(), nn.Linear(32, CALLS))
        self.bounded = bounded

    def forward(self, sound: Tensor) -> Tensor:
        age = torch.arange(sound.shape[1] - 1, -1, -1, dtype=sound.dtype)
        decay = self.decay.clamp(0, 0.9999) if self.bounded else self.decay
        kernel = decay ** age.unsqueeze(-1)  # guilty
        return self.read((self.inside(sound) * kernel).mean(1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    sound, call = batch
    return F.cross_entropy(model(sound), call)


def recordings(count: int, length: int, bands: Tensor) -> list[Tensor]:
    """A call near the beginning, and then noise."""
    call = torch.randint(CALLS, (count,))
    sound = 0.1 * torch.randn(count, length, BANDS)
    begin = torch.randint(20, 60, (count, 1))
    frame = torch.arange(length)
    rings = ((frame >= begin) & (frame < begin + 60)).float().unsqueeze(-1)
    return [sound + rings * bands[call].unsqueeze(1), call]


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    length, bands = int(torch.randint(500, 700, ())), torch.rand(CALLS, BANDS)
    return Program(
        model=StateSpace(int(torch.randint(24, 41, ())), bounded=mended),
        rows=TensorDataset(*recordings(int(torch.randint(700, 1000, ())), length, bands)),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        evaluation=recordings(200, length, bands),
        guilty=Guilty("overflow", ops=("pow", "float_power")),
        steps=500,
    )
