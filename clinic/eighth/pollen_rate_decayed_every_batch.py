"""A small MobileNet for grains of pollen; the decay that was meant for every epoch is taken after every batch.

`scheduler.step()` slipped one level too deep into the loop, one of the commonest questions on forums: "the loss stops
improving after the first epoch". The rate is below a millionth before the network has seen the grains twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Decayed(torch.optim.SGD):
    """SGD with the exponential decay of its script built in."""

    def __init__(self, weights: Any, lr: float, decay: float, every: int) -> None:
        super().__init__(weights, lr=lr, momentum=0.9)
        self.decay, self.every, self.count = decay, every, 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        done = super().step(closure)
        self.count += 1
        if self.count % self.every == 0:
            for group in self.param_groups:
                group["lr"] *= self.decay  # guilty
        return done


class InvertedResidual(nn.Module):
    def __init__(self, channels: int, widening: int) -> None:
        super().__init__()
        wide = channels * widening
        self.body = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, maps: Tensor) -> Tensor:
        return maps + self.body(maps)


class MobileNet(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(InvertedResidual(channels, 3), InvertedResidual(channels, 3))
        self.head = nn.Linear(channels, classes)

    def forward(self, grains: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(grains)).mean(dim=(2, 3)))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    grains, plants = batch
    return nn.functional.cross_entropy(model(grains), plants)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, classes, count = 16, 3 + seed % 3, 800
    plants = torch.randint(classes, (count + 128,))
    line = torch.linspace(-1, 1, side)
    away = (line.view(-1, 1) ** 2 + line**2).sqrt()
    angle = torch.atan2(line.view(-1, 1), line)
    spikes = (3 + 2 * plants).view(-1, 1, 1)
    turn = 6.28 * torch.rand(count + 128, 1, 1)
    border = 0.6 + 0.2 * torch.sin(spikes * angle + turn)
    grains = ((away < border).float() + 0.3 * torch.randn(count + 128, side, side)).unsqueeze(1)
    return Program(
        model=MobileNet(int(torch.randint(10, 17, ())), classes),
        rows=TensorDataset(grains[:count], plants[:count]),
        loss=loss,
        optimizer=partial(Decayed, lr=0.05, decay=0.85 - 0.05 * (seed % 2), every=count // 32 if mended else 1),
        evaluation=[grains[count:], plants[count:]],
        guilty=Guilty("optimizer"),
        steps=350,
    )
