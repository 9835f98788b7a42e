"""A hypernetwork gives the weights of a controller for each patient's pump, and its last layer is drawn as any other.

The weights that it writes are then several times larger than those of a network that is drawn by itself, the error of
the products is in the thousands, and SGD with momentum is beyond all bounds within a few steps. The paper "Principled
weight initialization for hypernetworks" is about it; people lower the rate a hundredfold instead.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Hypernetwork(nn.Module):
    """From facts about a patient to the weights of a network of two layers, which reads the last measurements."""

    def __init__(self, facts: int, senses: int, width: int, gain: float) -> None:
        super().__init__()
        self.senses, self.width = senses, width
        self.body = nn.Sequential(nn.Linear(facts, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.write = nn.Linear(64, senses * width + width * width + width)
        nn.init.kaiming_normal_(self.write.weight)
        with torch.no_grad():
            self.write.weight *= gain

    def forward(self, facts: Tensor, measured: Tensor) -> Tensor:
        written = self.write(self.body(facts))
        first, second, last = written.split([self.senses * self.width, self.width**2, self.width], dim=-1)
        hidden = F.relu(measured[:, None] @ first.view(-1, self.senses, self.width))
        hidden = F.relu(hidden @ second.view(-1, self.width, self.width))
        return (hidden @ last[..., None]).flatten()


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    facts, measured, dose = batch
    return F.mse_loss(model(facts, measured), dose)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    facts, senses, width = int(torch.randint(4, 8, ())), int(torch.randint(5, 9, ())), 48
    count, held_out = int(torch.randint(1000, 1600, ())), 192
    patient, measured = torch.randn(count + held_out, facts), torch.randn(count + held_out, senses)
    dose = 1.5 + measured[:, 0] * (1 + 0.5 * patient[:, 0]) + 0.5 * patient[:, 1] * measured[:, 1]
    return Program(
        model=Hypernetwork(facts, senses, width, gain=width**-0.5 if mended else 1.0),
        rows=TensorDataset(patient[:count], measured[:count], dose[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.015, momentum=0.9),
        evaluation=[patient[count:], measured[count:], dose[count:]],
        guilty=Guilty("explosion"),
        steps=300,
    )
