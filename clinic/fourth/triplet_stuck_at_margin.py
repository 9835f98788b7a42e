"""A slim VGG learns which photos show the same product, with the hardest triplets of each batch.

At too high a rate all embeddings fall into one point within a few steps. All distances are then 0, and the loss is the
margin, to the third digit, for the rest of the run: "triplet loss stuck at margin" is one of the oldest questions.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

MARGIN = 0.5


class SlimVgg(nn.Module):
    """VGG without its width: pairs of convolutions and pooling, then fully connected layers, and no batch norm."""

    def __init__(self, width: int, size: int, dims: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            layers += [nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        flat = 4 * width * (size // 8) ** 2
        self.head = nn.Sequential(nn.Linear(flat, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, dims))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        points: Tensor = self.head(self.features(images).flatten(1))
        return points


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, products = batch
    points = model(images)
    squares = (points[:, None] - points[None]).square().sum(-1)
    distances = squares.clamp(min=1e-8).sqrt()
    same = products[:, None] == products[None]
    farthest_friend = distances.masked_fill(~same, 0).amax(1)
    nearest_stranger = distances.masked_fill(same, float("inf")).amin(1)
    return F.relu(farthest_friend - nearest_stranger + MARGIN).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    products, size = int(torch.randint(8, 12, ())), 16
    rows, held_out = int(torch.randint(600, 900, ())), 96
    looks = F.interpolate(torch.randn(products, 3, 4, 4), size=size, mode="bilinear")
    product = torch.randint(products, (rows + held_out,))
    light = 1 + 0.3 * torch.randn(rows + held_out, 1, 1, 1)
    images = looks[product] * light + 0.3 * torch.randn(rows + held_out, 3, size, size)
    return Program(
        model=SlimVgg(width=8, size=size, dims=16),
        rows=TensorDataset(images[:rows], product[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=4e-4 if mended else 5e-3),
        evaluation=(images[rows:], product[rows:]),
        guilty=Guilty("explosion"),
        batch_size=48,
        steps=300,
    )
