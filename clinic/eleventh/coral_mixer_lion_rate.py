"""The optimizer is changed from SGD to Lion, and the rate stays what it was.

Lion moves every weight by the full rate at each step, whatever the gradient; its authors ask for a rate three to ten
times smaller than that of AdamW. A mixer of patches with layer normalisation, for photos of corals: the loss falls at
once by a little, then wanders far above what a small rate reaches, or above its start.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

RATE_OF_SGD, RATE_OF_LION = 5e-2, 1e-3


class Lion(Optimizer):
    def __init__(self, weights: Iterable[nn.Parameter], lr: float, decay: float = 0.01) -> None:
        super().__init__(weights, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["decay"])
                weight.sub_(torch.sign(0.9 * mean + 0.1 * weight.grad), alpha=group["lr"])
                mean.mul_(0.99).add_(weight.grad, alpha=0.01)


class Layer(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm_one, self.norm_two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.within = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm_one(x).mT).mT
        return x + self.within(self.norm_two(x))


class Mixer(nn.Module):
    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.layers = nn.Sequential(*(Layer(16, width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, photo: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.patch(photo).flatten(2).mT)).mean(1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    photo, coral = batch
    return nn.functional.cross_entropy(model(photo), coral)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    classes, size, rows, held_out = int(torch.randint(6, 10, ())), 16, int(torch.randint(1000, 1300, ())), 200
    coral = torch.randint(classes, (rows + held_out,))
    branches = nn.functional.interpolate(torch.randn(classes, 3, 6, 6), size, mode="bilinear")
    photo = branches[coral].roll(int(torch.randint(4, ())), -1) * (0.5 + torch.rand(rows + held_out, 1, 1, 1))
    photo = photo + 2 * torch.randn(rows + held_out, 3, size, size)
    return Program(
        model=Mixer(int(torch.randint(8, 11, ())) * 4, 2, classes),
        rows=TensorDataset(photo[:rows], coral[:rows]),
        loss=loss,
        optimizer=partial(Lion, lr=RATE_OF_LION if mended else RATE_OF_SGD),  # guilty
        evaluation=[photo[rows:], coral[rows:]],
        guilty=Guilty("explosion"),
        steps=240,
    )
