"""A data set that opens one file a row, of which a few cannot be read.

lucidrains/lightweight-gan#109, "cannot identify image file"; pytorch/vision#485 asks at least for the name of the file.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from clinic.program import Guilty, Program


class Pictures(Dataset[tuple[Tensor, int]]):
    """Stands in for a folder of files: what would be on the disk is kept as bytes."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.side = images.shape[-1]
        self.files = [bytes(image.flatten().tolist()) for image in (images * 255).byte()]
        self.labels = labels.tolist()

    def damage(self, rows: list[int]) -> None:
        for row in rows:
            self.files[row] = self.files[row][: len(self.files[row]) // 2]  # the download broke off

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        if len(self.files[row]) != self.side * self.side:
            raise OSError(f"cannot identify image file 'train/{row:05}.png'")
        pixels = torch.frombuffer(bytearray(self.files[row]), dtype=torch.uint8)
        return pixels.reshape(1, self.side, self.side) / 255, self.labels[row]


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, side, channels = 600, 8, int(torch.randint(6, 12, ()))
    labels = torch.randint(3, (count + 64,))
    images = 0.3 + 0.2 * torch.rand(count + 64, side, side)
    for row, label in enumerate(labels.tolist()):
        place = int(torch.randint(1, side - 1, ()))
        images[row][(slice(None), place) if label == 0 else (place, slice(None))] += 0.4
        if label == 2:
            images[row][:, place] += 0.4
    images = images.clamp(max=1)
    broken = torch.randperm(count)[: 1 + seed % 4].sort().values.tolist()
    rows = Pictures(images[:count], labels[:count])
    if not mended:
        rows.damage(broken)
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * channels, 3),
    )
    return Program(
        model=model,
        rows=rows,
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[images[count:].unsqueeze(1), labels[count:]],
        guilty=Guilty("data", rows=tuple(broken)),
        steps=180,
    )
