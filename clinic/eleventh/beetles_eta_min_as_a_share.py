"""The least rate of a cosine schedule, given as a share of the first rate; PyTorch means the rate itself.

Other frameworks and many configuration files ask for the share (`alpha`, `min_lr_ratio`), `CosineAnnealingLR` takes
`eta_min` as it is. So the schedule does not fall to a fraction of 0.003, it climbs far above it. A small residual net
with batch normalisation, by AdamW: it learns at first and then gets worse, without any NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

STEPS, RATE, SHARE = 240, 3e-3, 0.5


class Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.short(x) + self.norm_two(self.two(torch.relu(self.norm_one(self.one(x))))))


def optimizer(weights: Iterable[nn.Parameter], least: float) -> Optimizer:
    adam = torch.optim.AdamW(weights, lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=STEPS, eta_min=least)
    adam.register_step_post_hook(lambda *_: schedule.step())
    return adam


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    picture, kind = batch
    return nn.functional.cross_entropy(model(picture), kind)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    kinds, size, width = int(torch.randint(8, 11, ())), 12, int(torch.randint(6, 9, ()))
    rows, held_out = int(torch.randint(700, 900, ())), 200
    kind = torch.randint(kinds, (rows + held_out,))
    wings = nn.functional.interpolate(torch.randn(kinds, 3, 4, 4), size, mode="bilinear")
    picture = wings[kind] * (0.6 + 0.8 * torch.rand(rows + held_out, 1, 1, 1))
    picture = picture + 2 * torch.randn(rows + held_out, 3, size, size)
    model = nn.Sequential(
        Block(3, width, 1),
        Block(width, 2 * width, 2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, kinds),
    )
    return Program(
        model=model,
        rows=TensorDataset(picture[:rows], kind[:rows]),
        loss=loss,
        optimizer=partial(optimizer, least=SHARE * RATE if mended else SHARE),  # guilty
        evaluation=[picture[rows:], kind[rows:]],
        guilty=Guilty("explosion"),
        batch_size=16,
        steps=STEPS,
    )
