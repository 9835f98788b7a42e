"""The angle between prediction and truth: at a cosine that rounds to 1 `acos` has no slope, above 1 no value.

pytorch/pytorch#8069, "About Nan error using acos() function"; yuanming-hu/fc4#33, "without clip 'dot', the loss will be
'nan'". It comes late, when the directions are nearly right.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Compass(nn.Module):
    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.normalize(self.layers(inputs), dim=-1)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    inputs, directions = batch
    cosine = (model(inputs) * directions).sum(dim=-1)
    if mended:
        cosine = cosine.clamp(-1 + 1e-6, 1 - 1e-6)
    return torch.acos(cosine).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 6 + seed % 4, 1500
    heading = torch.rand(count + 96) * 2 * math.pi
    directions = torch.stack([heading.cos(), heading.sin()], dim=-1)
    inputs = torch.cat([directions * (0.5 + torch.rand(count + 96, 1)), torch.randn(count + 96, features - 2)], dim=-1)
    return Program(
        model=Compass(features, int(torch.randint(24, 40, ()))),
        rows=TensorDataset(inputs[:count], directions[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[inputs[count:], directions[count:]],
        guilty=Guilty("operation", ops=("acos", "arccos")),
        steps=280,
    )
