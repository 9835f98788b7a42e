"""Segmentation with the polynomial decay of DeepLab, built into the optimizer, and trained on after its last step.

base * (1 - step / last) ** 0.9 is negative under a broken power after `last`: NumPy answers NaN, with a warning that
nobody sees, and the next step writes it into every weight. `last` had been the right number before the data set grew.
The mend is to stay at zero from there on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class PolySGD(torch.optim.SGD):
    """SGD whose rate goes to zero within `last` steps."""

    def __init__(self, weights: Iterable[nn.Parameter], lr: float, last: int, least: float, **options: Any) -> None:
        super().__init__(weights, lr=lr, **options)
        self.base, self.last, self.least, self.done = lr, last, least, 0

    def step(self, closure: Any = None) -> Any:
        left = np.maximum(1 - self.done / self.last, self.least)
        for group in self.param_groups:
            group["lr"] = float(self.base * np.power(left, 0.9))  # guilty
        self.done += 1
        return super().step(closure)


class AtrousPyramid(nn.Module):
    """A small DeepLab: strided features, dilated branches, and back to the size of the picture."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        self.branches = nn.ModuleList(nn.Conv2d(width, width, 3, padding=rate, dilation=rate) for rate in (1, 2, 4))
        self.head = nn.Conv2d(3 * width, classes, 1)

    def forward(self, picture: Tensor) -> Tensor:
        feature = self.stem(picture)
        feature = torch.cat([F.relu(branch(feature)) for branch in self.branches], 1)
        return F.interpolate(self.head(feature), size=picture.shape[2:], mode="bilinear", align_corners=False)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    picture, classes = batch
    return F.cross_entropy(model(picture), classes)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    classes, side = int(torch.randint(3, 6, ())), 2 * int(torch.randint(10, 15, ()))
    rows, held_out, steps = int(torch.randint(300, 500, ())), 60, 240
    model = AtrousPyramid(int(torch.randint(10, 17, ())), classes)
    colour = torch.randn(classes, 3)
    fields = F.interpolate(torch.randn(rows + held_out, classes, 4, 4), size=(side, side), mode="bicubic")
    mask = fields.argmax(1)
    picture = colour[mask].permute(0, 3, 1, 2) + 0.8 * torch.randn(rows + held_out, 3, side, side)
    last = int(steps * float(torch.empty(()).uniform_(0.6, 0.9)))
    least = 0.0 if mended else -np.inf
    return Program(
        model=model,
        rows=TensorDataset(picture[:rows], mask[:rows]),
        loss=loss,
        optimizer=lambda weights: PolySGD(weights, lr=0.05, last=last, least=least, momentum=0.9, weight_decay=1e-4),
        evaluation=[picture[rows:], mask[rows:]],
        guilty=Guilty("optimizer"),
        batch_size=16,
        steps=steps,
    )
