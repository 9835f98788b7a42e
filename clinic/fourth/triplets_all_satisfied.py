"""Faces told apart with a triplet loss over all triplets of a batch, averaged over those that still violate the margin.

That is how FaceNet's followers do it, since the mean over all triplets fades as training succeeds. When it has
succeeded, and a batch has no violation left, it is zero over zero. The mend is to divide by one at least.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Embedder(nn.Module):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Linear(8 * width, outputs)

    def forward(self, picture: Tensor) -> Tensor:
        return self.head(self.features(picture).flatten(1))


def loss(model: nn.Module, batch: list[Tensor], least: int, margin: float = 1.0) -> Tensor:
    picture, person = batch
    face = model(picture)
    apart = (face[:, None] - face[None]).square().sum(-1)
    same = person[:, None] == person[None]
    different, same = ~same, same & ~torch.eye(len(person), dtype=torch.bool)
    valid = (same[:, :, None] & different[:, None, :]).float()
    hinge = F.relu(apart[:, :, None] - apart[:, None, :] + margin) * valid
    violated = (hinge > 0).float()
    return (hinge * violated).sum() / violated.sum().clamp(min=least)  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    people, side = int(torch.randint(6, 11, ())), int(torch.randint(10, 15, ()))
    rows, held_out = int(torch.randint(500, 800, ())), 64
    model = Embedder(int(torch.randint(8, 13, ())), int(torch.randint(8, 17, ())))
    likeness = F.interpolate(torch.randn(people, 1, 4, 4), size=(side, side), mode="bilinear")
    person = torch.randint(people, (rows + held_out,))
    light = torch.empty(rows + held_out, 1, 1, 1).uniform_(0.7, 1.3)
    picture = light * likeness[person] + 0.3 * torch.randn(rows + held_out, 1, side, side)
    return Program(
        model=model,
        rows=TensorDataset(picture[:rows], person[:rows]),
        loss=partial(loss, least=1 if mended else 0),
        optimizer=lambda weights: torch.optim.Adam(weights, lr=1e-3),
        evaluation=[picture[rows:], person[rows:]],
        guilty=Guilty("operation", ops=("div",)),
        batch_size=32,
        steps=300,
    )
