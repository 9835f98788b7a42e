"""A focal loss written by hand with gamma = 0.5: the slope of (1 - p) ** 0.5 has no end where p is one.

With the gamma of the paper (2) nothing happens; tuned below one, the first example that the network is so sure of that
its probability is 1.0 in float32 gives infinity times log(1) = 0, which is NaN. Many "focal loss returns NaN after some
epochs" questions are this one; mended by keeping p away from one before the power.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Detector(nn.Module):
    """Sorts proposals into background and a few kinds of object."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(features, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes)
        )

    def forward(self, proposals: Tensor) -> Tensor:
        return self.net(proposals)


GAMMA = 0.5


def focal(model: nn.Module, batch: list[Tensor], *, mended: bool) -> Tensor:
    proposals, labels = batch
    logs = model(proposals).log_softmax(-1).gather(1, labels.unsqueeze(-1)).squeeze(-1)
    sure = logs.exp()
    if mended:
        sure = sure.clamp(max=1 - 1e-6)
    return -((1 - sure) ** GAMMA * logs).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, classes, count = 10 + seed % 4, 4, 1200
    kinds = 1.3 * torch.randn(classes, features)
    labels = torch.where(torch.rand(count + 128) < 0.5, 0, torch.randint(1, classes, (count + 128,)))
    proposals = kinds[labels] + torch.randn(count + 128, features)
    # areas of boxes are what they are: a few proposals are very large
    proposals = proposals * torch.exp(0.7 * torch.randn(count + 128, 1))
    return Program(
        model=Detector(features, int(torch.randint(40, 64, ())), classes),
        rows=TensorDataset(proposals[:count], labels[:count]),
        loss=partial(focal, mended=mended),
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        evaluation=[proposals[count:], labels[count:]],
        guilty=Guilty("operation", ops=("pow",)),
        batch_size=48,
        steps=300,
    )
