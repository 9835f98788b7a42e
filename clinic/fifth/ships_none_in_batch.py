"""Ships in satellite pictures: most tiles are open sea, and a batch of nothing but sea has no box to compare.

An anchor-free detector in the style of torchvision. The errors of the boxes are collected image by image, images
without an object are passed over, and `torch.cat` gets an empty list once no image of a batch shows a ship: "expected a
non-empty list of Tensors". People meet it after hours of training, at no particular image.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

CELLS, STRIDE = 6, 4


class Detector(nn.Module):
    """A stem of three convolutions; each cell tells whether a ship's middle lies in it, and the ship's extent."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, 1, 1),
            nn.ReLU(),
        )
        self.ship = nn.Conv2d(2 * width, 1, 1)
        self.extent = nn.Conv2d(2 * width, 4, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        features = self.stem(image)
        return self.ship(features).squeeze(1), self.extent(features).permute(0, 2, 3, 1)


def loss(model: nn.Module, batch: list[Tensor], careful: bool) -> Tensor:
    image, ship, extent = batch
    score, guess = model(image)
    errors = []
    for one, (there, right) in enumerate(zip(ship.bool(), extent, strict=True)):
        if there.any():
            errors.append(F.smooth_l1_loss(guess[one][there], right[there], reduction="none").sum(-1))
    found = F.binary_cross_entropy_with_logits(score, ship, reduction="sum") / len(image)
    if careful and not errors:
        return found
    return found + torch.cat(errors).mean()  # guilty


def tiles(count: int, share: float) -> tuple[Tensor, Tensor, Tensor]:
    size = CELLS * STRIDE
    image, ship = 0.3 * torch.randn(count, 1, size, size), torch.zeros(count, CELLS, CELLS)
    extent = torch.zeros(count, CELLS, CELLS, 4)
    for one in range(count):
        if float(torch.rand(())) > share:
            continue
        for _ in range(int(torch.randint(1, 3, ()))):
            y, x = (int(item) for item in torch.randint(4, size - 4, (2,)))
            tall, wide = (int(item) for item in torch.randint(1, 4, (2,)))
            image[one, 0, y - tall : y + tall + 1, x - wide : x + wide + 1] += 1.5
            ship[one, y // STRIDE, x // STRIDE] = 1
            at = [y % STRIDE, x % STRIDE, tall, wide]
            extent[one, y // STRIDE, x // STRIDE] = torch.tensor(at).float()
    return image, ship, extent


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    data = tiles(int(torch.randint(1000, 1400, ())), share=0.2)
    held_out = tiles(160, share=0.2)
    return Program(
        model=Detector(int(torch.randint(10, 16, ()))),
        rows=TensorDataset(*data),
        loss=partial(loss, careful=mended),
        optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-4),
        evaluation=list(held_out),
        guilty=Guilty("operation", ops=("cat",)),
        batch_size=16,
        steps=300,
    )
