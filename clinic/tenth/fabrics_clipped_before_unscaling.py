"""Faults in fabrics by a small RegNet: the loss is multiplied by 1024, gradients are clipped, and only then unscaled.

The fixed loss scale comes from the days of half precision. The optimizer divides by it, as it should, but the clipping
comes before and sees gradients a thousand times too long: what is left of each is a norm of 1 / 1024. Nothing is wrong
with any number, and training does not get anywhere. PyTorch's "Automatic Mixed Precision examples" warn of it: call
`scaler.unscale_(optimizer)` before `clip_grad_norm_`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import RegNetConfig, RegNetForImageClassification

from clinic.program import Guilty, Program


class ScaledSGD(torch.optim.SGD):
    """SGD for gradients of a loss that was multiplied by `scale`."""

    def __init__(self, weights: Any, lr: float, momentum: float, scale: float) -> None:
        super().__init__(weights, lr=lr, momentum=momentum)
        self.scale = scale

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad.div_(self.scale)  # guilty
        return super().step(closure)


def loss(model: nn.Module, batch: list[Tensor], scale: float) -> Tensor:
    pictures, faults = batch
    return scale * nn.functional.cross_entropy(model(pictures).logits, faults)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, kinds, count = 16, 4, 640
    faults = torch.randint(kinds, (count + 96,))
    down, across = torch.meshgrid(torch.arange(float(side)), torch.arange(float(side)), indexing="ij")
    weave = torch.sin(1.6 * across + 6.3 * torch.rand(count + 96, 1, 1)) * torch.sin(
        1.6 * down + 6.3 * torch.rand(count + 96, 1, 1)
    )
    place = 3 + (side - 6) * torch.rand(count + 96, 2, 1, 1)
    along, beside = down - place[:, 0], across - place[:, 1]
    marks = torch.stack([along.abs() < 1, beside.abs() < 1, along**2 + beside**2 < 9])  # a weft, a warp, a hole
    marks = torch.cat([marks, torch.zeros_like(marks[:1])])[faults, torch.arange(count + 96)]
    dye = 0.5 + 0.5 * torch.rand(count + 96, 3, 1, 1)
    pictures = dye * torch.where(marks, -1.0, weave).unsqueeze(1) + 0.4 * torch.randn(count + 96, 3, side, side)
    config = RegNetConfig(
        embedding_size=12 + 4 * (seed % 2),
        hidden_sizes=[16, 32],
        depths=[1, 1],
        groups_width=8,
        layer_type="y",
        num_labels=kinds,
    )
    scale = 1.0 if mended else 1024.0
    return Program(
        model=RegNetForImageClassification(config),
        rows=TensorDataset(pictures[:count], faults[:count]),
        loss=partial(loss, scale=scale),
        optimizer=partial(ScaledSGD, lr=0.05, momentum=0.9, scale=scale),
        evaluation=[pictures[count:], faults[count:]],
        guilty=Guilty("optimizer"),
        steps=240,
        clip=1.0,
    )
