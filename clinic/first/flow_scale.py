"""A normalizing flow whose scales are `exp` of a net without bound; incomes have a long tail, and one is too long.

VincentStimper/normalizing-flows#73, "NaN's and inf loss seen during training"; ELIFE-ASU/INNLab#7 clips it softly.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Coupling(nn.Module):
    def __init__(self, size: int, width: int, swap: bool, mended: bool) -> None:
        super().__init__()
        self.swap = swap
        self.mended = mended
        self.net = nn.Sequential(nn.Linear(size // 2, width), nn.ReLU(), nn.Linear(width, size))

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        first, second = values.chunk(2, dim=-1)
        if self.swap:
            first, second = second, first
        log_scale, shift = self.net(first).chunk(2, dim=-1)
        if self.mended:
            log_scale = log_scale.clamp(-4, 4)
        second = second * torch.exp(log_scale) + shift  # guilty
        values = torch.cat([second, first] if self.swap else [first, second], dim=-1)
        return values, log_scale.sum(dim=-1)


class Flow(nn.Module):
    def __init__(self, size: int, width: int, layers: int, mended: bool) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(size, width, bool(at % 2), mended) for at in range(layers))

    def forward(self, values: Tensor) -> Tensor:
        """The negative log-likelihood of each row, but for a constant."""
        log_volume = torch.zeros(len(values))
        for coupling in self.couplings:
            values, log_scale = coupling(values)
            log_volume = log_volume + log_scale
        return 0.5 * values.square().sum(dim=-1) - log_volume


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (values,) = batch
    return model(values).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    size, count = 4 + 2 * (seed % 2), 900
    earned = torch.randn(count + 96, size // 2)
    owned = torch.tanh(earned @ torch.randn(size // 2, size // 2)) + 0.2 * torch.randn(count + 96, size // 2)
    values = torch.cat([earned, owned], dim=-1)
    rich = torch.randperm(count)[: 8 + 4 * (seed % 3)]
    values[rich] *= torch.exp(6 + 0.5 * torch.randn(len(rich), 1))
    return Program(
        model=Flow(size, int(torch.randint(16, 32, ())), 3 + seed % 2, mended),
        rows=TensorDataset(values[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[values[count:]],
        guilty=Guilty("overflow", ops=("exp",)),
        clip=5.0,
    )
