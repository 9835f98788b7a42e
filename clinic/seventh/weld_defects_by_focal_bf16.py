"""Weld defects are segmented with a focal loss written from the paper, and somebody turns on autocast to bfloat16.

In bfloat16 a sigmoid is exactly one from a logit of about six on: `log(1 - p)` is minus infinity for the first sure
pixels, times zero NaN. The loss was fine in float32 for months. Forums say: use the form with logits, in float32.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class UNet(nn.Module):
    """Two levels, and logits of every pixel."""

    def __init__(self, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.deep = nn.Sequential(
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.ReLU(),
            nn.Upsample(scale_factor=2),
        )
        self.head = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down(images)
        return self.head(torch.cat([fine, self.deep(fine)], dim=1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, masks = batch
    logits = model(images)
    if model.mended:
        logits = logits.float()
        cross = nn.functional.binary_cross_entropy_with_logits(logits, masks, reduction="none")
        return ((masks - logits.sigmoid()).abs().square() * cross).mean() * 10
    p = logits.sigmoid()
    sure = masks * (1 - p).square() * p.log()
    unsure = (1 - masks) * p.square() * torch.log(1 - p)  # guilty
    return -(sure + unsure).mean() * 10


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, count = 20, 480
    centres = 4 + (side - 8) * torch.rand(count + 64, 2, 1)
    radius = 2 + 2.5 * torch.rand(count + 64, 1, 1)
    reach = torch.arange(side)
    across = (reach - centres[:, 0]).square().unsqueeze(1)
    masks = ((reach - centres[:, 1]).square().unsqueeze(2) + across < radius.square()).float()
    images = masks * (1.2 + 0.5 * torch.rand(count + 64, 1, 1)) + 0.25 * torch.randn(count + 64, side, side)
    images, masks = images.unsqueeze(1), masks.unsqueeze(1)
    return Program(
        model=UNet(6 + seed % 3, mended),
        rows=TensorDataset(images[:count], masks[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[images[count:], masks[count:]],
        guilty=Guilty("operation", ops=("log",)),
        batch_size=16,
        steps=300,
        bf16=True,
    )
