"""A perceptual loss that divides features by their norm, the epsilon outside of the root: f / (sqrt(sum f^2) + 1e-10).

Dark frames are brightened by a map of gains that a small residual network draws. A few films are letterboxed: their
bars are exactly black, black times a gain stays black, the features there are zero, and the root has no slope at zero.
Known from issues of perceptual metrics: "gradient is NaN for black images".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.two(torch.relu(self.one(x))))


class Brighten(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gains = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), Block(width), nn.Conv2d(width, 3, 1))

    def forward(self, frame: Tensor) -> Tensor:
        return frame * self.gains(frame).exp()


def perceptual(stem: nn.Module, ours: Tensor, theirs: Tensor, mended: bool) -> Tensor:
    def unit(image: Tensor) -> Tensor:
        features = nn.functional.silu(stem(image))
        if mended:
            return features / torch.sqrt(features.square().sum(1, keepdim=True) + 1e-8)
        return features / (torch.sqrt(features.square().sum(1, keepdim=True)) + 1e-10)  # guilty

    return (unit(ours) - unit(theirs)).square().sum(1).mean()


def loss(model: nn.Module, batch: list[Tensor], stem: nn.Module, mended: bool) -> Tensor:
    dark, bright = batch
    ours = model(dark)
    return nn.functional.l1_loss(ours, bright) + 0.1 * perceptual(stem, ours, bright, mended)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, size = 500, 64, 12
    coarse = torch.rand(rows + held_out, 3, 5, 5)
    bright = nn.functional.interpolate(coarse, size, mode="bilinear") + 0.1 * torch.rand(rows + held_out, 3, size, size)
    lamp = 0.15 + 0.5 * torch.rand(rows + held_out, 3, 1, 1) * torch.linspace(0.3, 1, size)
    letterboxed = torch.randperm(rows)[: int(torch.randint(8, 14, ()))]
    bar = int(torch.randint(2, 4, ()))
    for row in letterboxed.tolist():
        bright[row, :, :bar] = bright[row, :, -bar:] = 0
    dark = bright * lamp
    stem = nn.Conv2d(3, 24, 3, padding=1, bias=False).requires_grad_(False)
    return Program(
        model=Brighten(int(torch.randint(8, 12, ()))),
        rows=TensorDataset(dark[:rows], bright[:rows]),
        loss=partial(loss, stem=stem, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[dark[rows:], bright[rows:]],
        guilty=Guilty("operation", ops=("sqrt",)),
        steps=200,
    )
