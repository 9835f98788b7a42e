"""Traffic signs by a spatial transformer, as in PyTorch's tutorial, with Adam at 0.03 in place of its SGD at 0.01.

The first updates throw the affine map so far that the grid lies beside the picture: `grid_sample` pads with zeros
there, its slope is zero too, and the loss stays at that of guessing. Asked as "STN outputs a black image, does not
train".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class SpatialTransformer(nn.Module):
    """The net of the tutorial, a little smaller: it looks where to look, samples there, and classifies what it saw."""

    def __init__(self, kinds: int, channels: int, looked_at: int) -> None:
        super().__init__()
        self.looked_at = looked_at
        self.localization = nn.Sequential(
            nn.Conv2d(1, channels, 5, padding=2),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 5, padding=2),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.theta = nn.Sequential(nn.Linear(channels * 36, 32), nn.ReLU(), nn.Linear(32, 6))
        self.classifier = nn.Sequential(
            nn.Conv2d(1, 12, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(12 * ((looked_at - 2) // 2) ** 2, 32),
            nn.ReLU(),
            nn.Linear(32, kinds),
        )
        last = self.theta[2]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        with torch.no_grad():
            last.bias.copy_(torch.tensor([0.8, 0.0, 0.0, 0.0, 0.8, 0.0]))

    def forward(self, pictures: Tensor) -> Tensor:
        theta = self.theta(self.localization(pictures)).view(-1, 2, 3)
        size = [len(pictures), 1, self.looked_at, self.looked_at]
        grid = nn.functional.affine_grid(theta, size, align_corners=False)
        return self.classifier(nn.functional.grid_sample(pictures, grid, align_corners=False))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    pictures, kinds = batch
    return nn.functional.cross_entropy(model(pictures), kinds)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    kinds, side, size, count = 5 + seed % 3, 24, 10, 900
    signs = (nn.functional.interpolate(torch.randn(kinds, 1, 5, 5), size=(size, size), mode="bilinear") > 0).float()
    labels = torch.randint(kinds, (count + 128,))
    pictures = 0.15 * torch.randn(count + 128, 1, side, side)
    for row, (down, across) in enumerate(torch.randint(side - size + 1, (count + 128, 2)).tolist()):
        pictures[row, 0, down : down + size, across : across + size] += 2 * signs[labels[row], 0] - 1
    return Program(
        model=SpatialTransformer(kinds, 8 + 2 * (seed % 2), 14),
        rows=TensorDataset(pictures[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-3 if mended else 3e-2),  # guilty
        evaluation=[pictures[count:], labels[count:]],
        guilty=Guilty("optimizer"),
        steps=240,
    )
