"""Binary cross-entropy by hand. All is well until the sigmoid saturates: then 0 * log(1 - 1) is NaN.

openvinotoolkit/openvino#29745 warns that it "may lead to numerical instability". It comes late, when the classes are
already told apart.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Detector(nn.Module):
    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    inputs, labels = batch
    logits = model(inputs)
    if mended:
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)
    chance = torch.sigmoid(logits)
    return -(labels * chance.log() + (1 - labels) * (1 - chance).log()).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 8 + seed % 7, 1200
    labels = (torch.rand(count + 128) < 0.4).float()
    inputs = torch.randn(count + 128, features)
    inputs[:, :3] += 4.0 * labels[:, None] - 2.0
    return Program(
        model=Detector(features, int(torch.randint(24, 48, ()))),
        rows=TensorDataset(inputs[:count], labels[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=6e-3),
        evaluation=[inputs[count:], labels[count:]],
        guilty=Guilty("operation", ops=("log",)),
        steps=260,
    )
