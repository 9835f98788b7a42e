"""Claims by a Tweedie model with the logarithm of the exposure as an offset; policies cancelled at once have none.

The offset is minus infinity, the expected claim zero, and the deviance asks for `0 * 0 ** -0.5`. As in questions about
porting the French motor insurance example from scikit-learn, which clips the exposure without a word.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Tariff(nn.Module):
    def __init__(self, features: int, width: int, power: float, mended: bool) -> None:
        super().__init__()
        self.power, self.mended = power, mended
        self.body = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, policies: Tensor, exposure: Tensor) -> Tensor:
        if self.mended:
            exposure = exposure.clamp(min=1 / 365)
        offset = torch.log(exposure)  # guilty
        return torch.exp(self.body(policies).squeeze(-1) + offset)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    policies, exposure, claims = batch
    expected, power = model(policies, exposure), model.power
    return (expected ** (2 - power) / (2 - power) - claims * expected ** (1 - power) / (1 - power)).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 6 + seed % 4, 1600
    policies = torch.randn(count + 256, features)
    exposure = 0.2 + 0.8 * torch.rand(count + 256)
    exposure[torch.randperm(count)[: 4 + seed % 5]] = 0.0
    rate = torch.exp(1.6 + 1.0 * policies[:, 0] - 0.8 * policies[:, 1])
    claims = torch.poisson(4 * rate * exposure) / 4
    tensors = [policies, exposure, claims]
    return Program(
        model=Tariff(features, int(torch.randint(16, 33, ())), 1.5, mended),
        rows=TensorDataset(*(tensor[:count] for tensor in tensors)),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[tensor[count:] for tensor in tensors],
        guilty=Guilty("operation", ops=("log",)),
        steps=400,
    )
