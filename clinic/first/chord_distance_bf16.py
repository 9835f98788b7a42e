"""The distance of unit vectors as the root of 2 - 2 * cosine, under bfloat16: the cosine rounds to 1, or beyond it.

Fine in float32, where nobody gets so near; bfloat16 has three digits. The root is that of pytorch/pytorch#6394.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Faces(nn.Module):
    """Embeds a picture on the unit sphere, next to where its person is."""

    def __init__(self, features: int, people: int, size: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.layers = nn.Sequential(nn.Linear(features, 48), nn.ReLU(), nn.Linear(48, size))
        self.people = nn.Parameter(torch.randn(people, size))

    def forward(self, pictures: Tensor) -> Tensor:
        """The distance of each picture from each person."""
        embedded = nn.functional.normalize(self.layers(pictures), dim=-1)
        cosine = embedded @ nn.functional.normalize(self.people, dim=-1).T
        if self.mended:
            cosine = cosine.float().clamp(max=1 - 1e-3)
        return torch.sqrt(2 - 2 * cosine)  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    pictures, people = batch
    return nn.functional.cross_entropy(-6 * model(pictures), people)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, people, count = 12 + seed % 5, 5 + seed % 4, 1000
    centres = 2 * torch.randn(people, features)
    labels = torch.randint(people, (count + 96,))
    pictures = centres[labels] + 0.6 * torch.randn(count + 96, features)
    return Program(
        model=Faces(features, people, int(torch.randint(6, 10, ())), mended),
        rows=TensorDataset(pictures[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[pictures[count:], labels[count:]],
        guilty=Guilty("operation", ops=("sqrt",)),
        bf16=True,
    )
