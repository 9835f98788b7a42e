"""The mass of a cluster from the set of its galaxies: features are summed over all members, and so are gradients.

With the plain SGD settings of a network for single objects the loss is infinite after a dozen updates. Asked as
"DeepSets with sum pooling gives nan, with mean pooling it works".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class DeepSets(nn.Module):
    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.all = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, members: Tensor) -> Tensor:
        return self.all(self.each(members).sum(dim=1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    members, masses = batch
    return nn.functional.mse_loss(model(members), masses)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, members, count = 3 + seed % 2, int(torch.randint(40, 80, ())), 800
    spread = torch.exp(0.5 * torch.randn(count + 128))
    galaxies = torch.randn(count + 128, members, features)
    galaxies[..., 0] = galaxies[..., 0] * spread.unsqueeze(-1)
    masses = 2 * spread.log() + 0.1 * torch.randn(count + 128)
    return Program(
        model=DeepSets(features, int(torch.randint(24, 40, ()))),
        rows=TensorDataset(galaxies[:count], masses[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=2e-4 if mended else 0.05, momentum=0.9),
        evaluation=[galaxies[count:], masses[count:]],
        guilty=Guilty("explosion"),
        steps=300,
    )
