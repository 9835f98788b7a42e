"""The rate is to be divided by ten at each milestone, so the schedule is given a ten; it multiplies by it.

`MultiStepLR(..., gamma=10)`, by people who come from frameworks where one gives the divisor. BEiT sorts
photographs of mosses; it learns well up to the first milestone, and then all is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import NAdam, Optimizer
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import TensorDataset
from transformers import BeitConfig, BeitForImageClassification

from clinic.program import Guilty, Program

MILESTONES = (100, 180)


def scheduled(weights: Iterable[nn.Parameter], gamma: float) -> Optimizer:
    optimizer = NAdam(weights, lr=2e-3)
    schedule = MultiStepLR(optimizer, MILESTONES, gamma=gamma)

    def after_step(*_: Any) -> None:
        schedule.step()

    optimizer.register_step_post_hook(after_step)
    return optimizer


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    pixels, label = batch
    return nn.functional.cross_entropy(model(pixel_values=pixels).logits, label)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    kinds, size = int(torch.randint(6, 10, ())), 12
    rows, held_out = int(torch.randint(800, 1100, ())), 160
    label = torch.randint(kinds, (rows + held_out,))
    leaf = nn.functional.interpolate(torch.randn(kinds, 3, 4, 4), size=size, mode="bilinear")
    bright = 0.7 + 0.6 * torch.rand(rows + held_out, 1, 1, 1)
    pixels = bright * leaf[label] + 0.9 * torch.randn(rows + held_out, 3, size, size)
    config = BeitConfig(
        image_size=size,
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        use_relative_position_bias=True,
        use_mean_pooling=True,
        layer_scale_init_value=0.1,
        out_indices=[2],
        num_labels=kinds,
    )
    gamma = 0.1 if mended else 10.0  # guilty
    return Program(
        model=BeitForImageClassification(config),
        rows=TensorDataset(pixels[:rows], label[:rows]),
        loss=loss,
        optimizer=partial(scheduled, gamma=gamma),
        evaluation=[pixels[rows:], label[rows:]],
        guilty=Guilty("explosion"),
        steps=260,
    )
