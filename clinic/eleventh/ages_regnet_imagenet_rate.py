"""Somebody's age by regression, with the rate of the same network's recipe for ImageNet.

SGD at 0.1 with momentum is right for the cross-entropy of RegNet. The squared error of ages around forty has gradients
hundreds of times as large: "my loss is 1600, then 1e12, then nan".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import RegNetConfig, RegNetForImageClassification

from clinic.program import Guilty, Program

IMAGENET_RATE = 0.1


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    faces, age = batch
    return nn.functional.mse_loss(model(pixel_values=faces).logits.squeeze(-1), age)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, size = int(torch.randint(700, 1000, ())), 160, 16
    age = 18 + 60 * torch.rand(rows + held_out)
    face = nn.functional.interpolate(torch.randn(1, 3, 4, 4), size=size, mode="bilinear")
    wrinkle = torch.sin(2.2 * torch.arange(size)).view(1, 1, -1, 1)
    strength = ((age - 18) / 60).view(-1, 1, 1, 1)
    faces = face + 1.5 * strength * wrinkle + 0.5 * torch.randn(rows + held_out, 3, size, size)
    config = RegNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 24],
        depths=[1, 1],
        groups_width=8,
        layer_type="x",
        num_labels=1,
    )
    rate = IMAGENET_RATE / 100 if mended else IMAGENET_RATE  # guilty
    return Program(
        model=RegNetForImageClassification(config),
        rows=TensorDataset(faces[:rows], age[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=rate, momentum=0.9, weight_decay=5e-5),
        evaluation=[faces[rows:], age[rows:]],
        guilty=Guilty("explosion"),
        steps=200,
    )
