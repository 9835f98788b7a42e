"""A model in half precision and Adam as it comes: its epsilon of 1e-8 is 0 in float16, and an idle weight is 0 / 0.

pytorch/pytorch#8860, "NaN loss when using half precision" (`eps=1e-4` helps); afiaka87/glide-finetune#5.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class HalfNet(nn.Module):
    """Computes in half precision; the rest of the program sees float32."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
        )
        self.layers.half()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs.half()).float()


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, classes, count = 8 + seed % 6, 3 + seed % 3, 900
    centres = 1.2 * torch.randn(classes, features)
    labels = torch.randint(classes, (count + 96,))
    inputs = centres[labels] + torch.randn(count + 96, features)
    inputs[:, -1] = 0.0  # a feature that is never there
    return Program(
        model=HalfNet(features, int(torch.randint(32, 64, ())), classes),
        rows=TensorDataset(inputs[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3, eps=1e-4 if mended else 1e-8),  # guilty
        evaluation=[inputs[count:], labels[count:]],
        guilty=Guilty("optimizer"),
    )
