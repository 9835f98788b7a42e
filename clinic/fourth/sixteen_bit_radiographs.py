"""Radiographs from several hospitals as PNG files, all divided by 255. Those of one hospital have sixteen bits.

Its few pictures are up to 257 where the others are up to one. Batch normalisation takes its mean and variance from
them, the rest of the batch becomes grey, and what is stored for the evaluation is of no use. Nothing is infinite: the
accuracy is just "strange". The mend is to divide by the largest value of the file's own depth.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from clinic.program import Guilty, Program


class Radiographs(Dataset[tuple[Tensor, Tensor]]):
    """Pictures as they are in the files, and whether there is a nodule."""

    def __init__(self, count: int, side: int, sixteen_bit: int, by_depth: bool) -> None:
        axis = torch.linspace(-1, 1, side)
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        lungs = 0.55 - 0.35 * torch.exp(-((x.abs() - 0.5) ** 2 + y**2) / 0.15)
        self.nodule = (torch.rand(count) < 0.5).float()
        centre = torch.rand(count, 2, 1, 1) * 1.2 - 0.6
        blob = torch.exp(-((x - centre[:, 0]) ** 2 + (y - centre[:, 1]) ** 2) / 0.03)
        picture = lungs + 0.3 * self.nodule[:, None, None] * blob + 0.05 * torch.randn(count, side, side)
        self.largest = torch.full((count,), 255)
        self.largest[torch.randperm(count)[:sixteen_bit]] = 65535
        self.pixels = (picture.clamp(0, 1) * self.largest[:, None, None]).round().to(torch.int32)
        self.by_depth = by_depth

    def __len__(self) -> int:
        return len(self.nodule)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        divisor = self.largest[row] if self.by_depth else 255
        return self.pixels[row].float()[None] / divisor, self.nodule[row]


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


class DenseNet(nn.Module):
    def __init__(self, growth: int, blocks: int, layers: int) -> None:
        super().__init__()
        width = 2 * growth
        parts: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1, bias=False)]
        for block in range(blocks):
            for _ in range(layers):
                parts.append(DenseLayer(width, growth))
                width += growth
            if block < blocks - 1:
                parts += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1), nn.AvgPool2d(2)]
                width //= 2
        self.features = nn.Sequential(*parts, nn.BatchNorm2d(width), nn.ReLU())
        self.classifier = nn.Linear(width, 1)

    def forward(self, picture: Tensor) -> Tensor:
        return self.classifier(self.features(picture).amax((2, 3))).squeeze(-1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    picture, nodule = batch
    return F.binary_cross_entropy_with_logits(model(picture), nodule)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, count = int(torch.randint(16, 21, ())), int(torch.randint(500, 800, ()))
    model = DenseNet(int(torch.randint(6, 9, ())), blocks=2, layers=2)
    rows = Radiographs(count, side, sixteen_bit=count // 40, by_depth=mended)
    held_out = Radiographs(200, side, 0, by_depth=True)
    return Program(
        model=model,
        rows=rows,
        loss=loss,
        optimizer=lambda weights: torch.optim.RMSprop(weights, lr=1e-3),
        evaluation=(held_out.pixels.float()[:, None] / 255, held_out.nodule),
        guilty=Guilty("data", rows=tuple((rows.largest == 65535).nonzero().flatten().tolist())),
        batch_size=32,
        steps=240,
    )
