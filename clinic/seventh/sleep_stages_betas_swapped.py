"""Adam is made with `betas=(0.999, 0.9)`: the two averages have changed places.

The momentum remembers a thousand steps and the scale ten: the weights run far past every minimum, and small gradients
make large steps. A slip in configuration files where the two numbers stand under each other, and hard to see there.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class SleepStages(nn.Module):
    """Windows of an electroencephalogram, by convolutions and a recurrent layer."""

    def __init__(self, width: int, stages: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(2, width, 9, stride=3), nn.ReLU(), nn.Conv1d(width, width, 5, stride=2), nn.ReLU()
        )
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, stages)

    def forward(self, waves: Tensor) -> Tensor:
        return self.head(self.recurrent(self.convolutions(waves).transpose(1, 2))[1][-1])


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    waves, stages = batch
    return nn.functional.cross_entropy(model(waves), stages)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    stages, samples, count = 4 + seed % 2, 90, 1000
    stage = torch.randint(stages, (count + 128,))
    time = torch.arange(samples)
    pitch = torch.tensor([0.1, 0.3, 0.55, 0.85, 1.2])[stage, None, None] * (0.9 + 0.2 * torch.rand(count + 128, 2, 1))
    waves = torch.sin(pitch * time + 6.3 * torch.rand(count + 128, 2, 1)) + 0.7 * torch.randn(count + 128, 2, samples)
    return Program(
        model=SleepStages(int(torch.randint(16, 25, ())), stages),
        rows=TensorDataset(waves[:count], stage[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=0.025, betas=(0.9, 0.999) if mended else (0.999, 0.9)),
        evaluation=[waves[count:], stage[count:]],
        guilty=Guilty("optimizer"),
        steps=300,
    )
