"""Images brought to mean 0 and spread 1 by hand, without an epsilon: of a blank image that is 0 / 0.

apasarkar/masknmf-toolbox#32, "the neural net code generates nan values if the input is constant".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Standardize(nn.Module):
    def __init__(self, mended: bool) -> None:
        super().__init__()
        self.epsilon = 1e-3 if mended else 0.0

    def forward(self, images: Tensor) -> Tensor:
        mean = images.mean(dim=(-2, -1), keepdim=True)
        spread = images.std(dim=(-2, -1), keepdim=True)
        return (images - mean) / (spread + self.epsilon)  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def stripes(count: int, side: int) -> tuple[Tensor, Tensor]:
    """Stripes that run down, across, or along a diagonal."""
    labels = torch.randint(3, (count,))
    down, across = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    ways = torch.stack([down, across, down + across]).float()
    shift = 6 * torch.rand(count, 1, 1)
    images = torch.sin(1.3 * ways[labels] + shift) + 0.4 * torch.randn(count, side, side)
    return (100 + 20 * images).unsqueeze(1), labels


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, side, channels = 900, 8, int(torch.randint(6, 12, ()))
    images, labels = stripes(count + 96, side)
    images[torch.randperm(count)[: 8 + 2 * (seed % 4)]] = float(torch.randint(256, ()))  # lens cap on, or overexposed
    model = nn.Sequential(
        Standardize(mended),
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels * side * side // 4, 3),
    )
    return Program(
        model=model,
        rows=TensorDataset(images[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        evaluation=[images[count:], labels[count:]],
        guilty=Guilty("operation", ops=("div", "true_divide")),
        steps=200,
    )
