"""The learning rate of a recipe for SGD, kept when momentum was turned up to 0.99: a hundred times the step.

Asked on forums as "loss decreases for some iterations, then increases until it is nan; only with momentum".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Autoencoder(nn.Module):
    def __init__(self, features: int, hidden: int, code: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, features))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decoder(self.encoder(inputs))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (inputs,) = batch
    return (model(inputs) - inputs).square().sum(dim=-1).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, code, count = 12 + seed % 7, 4, 800
    inputs = torch.randn(count + 96, code) @ torch.randn(code, features)
    inputs = inputs + 0.1 * torch.randn(count + 96, features)
    momentum = 0.9 if mended else 0.99
    rate = 2e-4 if mended else 2e-2
    return Program(
        model=Autoencoder(features, int(torch.randint(32, 48, ())), code),
        rows=TensorDataset(inputs[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=rate, momentum=momentum),  # guilty
        evaluation=[inputs[count:]],
        guilty=Guilty("explosion"),
    )
