"""A cyclical learning rate with the bounds that the manual's example has, 0.01 and 0.1, which are there for SGD.

`CyclicLR(optimizer, base_lr=0.01, max_lr=0.1)` is copied as it stands, put to work with AdamW, and the range test that
the bounds should come from was never made: "the loss goes up and down with the schedule and ends where it began". Here
a pyramid vision transformer (PVT) that tells weaves of fabric apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import PvtConfig, PvtForImageClassification

from clinic.program import Guilty, Program


class Cyclic(torch.optim.AdamW):
    """AdamW whose rate goes up and down between two bounds, in straight lines."""

    def __init__(self, weights: Any, base: float, most: float, up: int) -> None:
        super().__init__(weights, lr=base)
        self.base, self.most, self.up, self.taken = base, most, up, 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        done = super().step(closure)
        self.taken += 1
        height = 1 - abs(self.taken % (2 * self.up) / self.up - 1)
        for group in self.param_groups:
            group["lr"] = self.base + (self.most - self.base) * height
        return done


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    pictures, weaves = batch
    return nn.functional.cross_entropy(model(pixel_values=pictures).logits, weaves)


def woven(weaves: Tensor, kinds: int, side: int) -> Tensor:
    """Ridges that run in the direction of the weave, of any width and colour, with lint on them."""
    down, across = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    angle = math.pi * (weaves + 0.3 * torch.rand(len(weaves))) / kinds
    along = angle.cos()[:, None, None] * across + angle.sin()[:, None, None] * down
    width, begin = 0.7 + 0.8 * torch.rand(len(weaves), 1, 1), 6.3 * torch.rand(len(weaves), 1, 1)
    colour = 0.5 + torch.rand(len(weaves), 3, 1, 1)
    return colour * (along * width + begin).sin().unsqueeze(1) + 0.5 * torch.randn(len(weaves), 3, side, side)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    kinds, side, count = 4 + seed % 3, 16, 960
    weaves = torch.randint(kinds, (count + 128,))
    pictures = woven(weaves, kinds, side)
    config = PvtConfig(
        image_size=side,
        num_encoder_blocks=2,
        depths=[1, 1],
        hidden_sizes=[16, 32],
        sequence_reduction_ratios=[2, 1],
        patch_sizes=[4, 2],
        strides=[4, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
        drop_path_rate=0.0,
        num_labels=kinds,
    )
    base, most = (2e-4, 4e-3) if mended else (1e-2, 1e-1)  # guilty
    return Program(
        model=PvtForImageClassification(config),
        rows=TensorDataset(pictures[:count], weaves[:count]),
        loss=loss,
        optimizer=partial(Cyclic, base=base, most=most, up=count // 32),
        evaluation=[pictures[count:], weaves[count:]],
        guilty=Guilty("optimizer"),
        steps=300,
    )
