"""A series of brain scans as a sum of products of three factors (CP), found by SGD over single voxels.

Each factor is drawn with unit variance and the rank is a few dozen, so that the first guesses are several times what is
measured; the slope of each factor is the product of the other two, and the rows of time, which a batch uses many times
over, overshoot at once. Met by whoever moves from alternating least squares to a "just use autograd" version.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Factors(nn.Module):
    """One embedding for the place, one for the time, one for the person."""

    def __init__(self, sizes: tuple[int, int, int], rank: int, spread: float) -> None:
        super().__init__()
        self.factors = nn.ModuleList(nn.Embedding(size, rank) for size in sizes)
        for factor in self.factors:
            nn.init.normal_(factor.weight, std=spread)

    def forward(self, index: Tensor) -> Tensor:
        place, time, person = (factor(index[:, way]) for way, factor in enumerate(self.factors))
        return (place * time * person).sum(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    index, value = batch
    return (model(index) - value).pow(2).sum()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    sizes = (int(torch.randint(16, 24, ())), int(torch.randint(10, 16, ())), int(torch.randint(5, 8, ())))
    rank = int(torch.randint(24, 33, ()))
    parts = [torch.randn(size, 2) for size in sizes]
    count, held_out = 3000, 300
    index = torch.stack([torch.randint(size, (count + held_out,)) for size in sizes], dim=-1)
    value = (parts[0][index[:, 0]] * parts[1][index[:, 1]] * parts[2][index[:, 2]]).sum(-1)
    value = value + 0.1 * torch.randn(count + held_out)
    return Program(
        model=Factors(sizes, rank, 0.5 if mended else 1.0),
        rows=TensorDataset(index[:count], value[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.03),
        evaluation=[index[count:], value[count:]],
        guilty=Guilty("explosion"),
        batch_size=64,
        steps=400,
    )
