"""The geodesic distance of two rotations by `acos`, in a network that begins with "change nothing".

The last layer of a pose refiner is set to zero, so that its first answer is the identity; a part of the pairs needs no
correction. There the cosine is exactly one: the slope of acos is infinite, and the slope of what is below it zero.
Asked as "acos gives NaN gradient" (pytorch/pytorch#8069, and PyTorch3D has its own acos for it); mended by a clamp to
just inside of [-1, 1].
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Refiner(nn.Module):
    """A correction, as a unit quaternion, from what the two views disagree in."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.head = nn.Linear(width, 3)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, views: Tensor) -> Tensor:
        turn = self.head(self.body(views))
        return nn.functional.normalize(torch.cat([torch.ones_like(turn[:, :1]), turn], -1), dim=-1)


def geodesic(model: nn.Module, batch: list[Tensor], *, mended: bool) -> Tensor:
    views, truth = batch
    cosine = (model(views) * truth).sum(-1).abs()
    cosine = cosine.clamp(max=1 - 1e-6 if mended else 1.0)
    return (2 * torch.acos(cosine)).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 9 + seed % 4, 1000
    rows = count + 96
    turn = 0.8 * torch.randn(rows, 3)
    turn[torch.rand(rows) < 0.3] = 0.0
    truth = nn.functional.normalize(torch.cat([torch.ones(rows, 1), turn], -1), dim=-1)
    views = turn @ torch.randn(3, features) + 0.05 * torch.randn(rows, features)
    return Program(
        model=Refiner(features, int(torch.randint(32, 49, ()))),
        rows=TensorDataset(views[:count], truth[:count]),
        loss=partial(geodesic, mended=mended),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[views[count:], truth[count:]],
        guilty=Guilty("operation", ops=("acos",)),
        steps=240,
    )
