"""Firing rates of neurons by `log(1 + exp(drive))`: it overflows once the model has learned how fast a burst is.

Poisson regression of spike counts with a softplus as the textbook has it. Most neurons fire some twenty times in a
bin, but in bursts more than a hundred times, and there `exp` is infinite.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Encoder(nn.Module):
    def __init__(self, features: int, width: int, neurons: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.drive = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, neurons))

    def forward(self, stimuli: Tensor) -> Tensor:
        drive = self.drive(stimuli)
        if self.mended:
            return nn.functional.softplus(drive) + 1e-4
        return torch.log(1 + torch.exp(drive)) + 1e-4  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    stimuli, counts = batch
    return nn.functional.poisson_nll_loss(model(stimuli), counts, log_input=False, full=True)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, neurons, count = 6 + seed % 4, 3 + seed % 3, 1000
    stimuli = torch.randn(count + 128, features)
    rates = 20 * torch.exp(0.5 * torch.tanh(stimuli @ torch.randn(features, neurons) / features**0.5))
    bursts = torch.randperm(count)[: 40 + 10 * (seed % 3)]
    stimuli[bursts, 0] = 4 + 0.3 * torch.rand(len(bursts))
    rates[bursts] = 125.0 + 20 * torch.rand(len(bursts), 1)
    return Program(
        model=Encoder(features, int(torch.randint(32, 64, ())), neurons, mended),
        rows=TensorDataset(stimuli[:count], torch.poisson(rates[:count])),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-2),
        evaluation=[stimuli[count:], torch.poisson(rates[count:])],
        guilty=Guilty("overflow", ops=("exp",)),
        steps=400,
    )
