"""Negatives are drawn by distance, none beyond a cutoff; once an anchor has pushed all away, there is nothing to draw.

Distance-weighted sampling (Wu et al., "Sampling matters") in the usual hand-written form; people meet it as "invalid
multinomial distribution (sum of probabilities <= 0)" after an epoch or two.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Embedding(nn.Module):
    def __init__(self, features: int, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.body = nn.Sequential(nn.Linear(features, 48), nn.ReLU(), nn.Linear(48, width))

    def forward(self, butterflies: Tensor) -> Tensor:
        return nn.functional.normalize(self.body(butterflies), dim=-1)

    def negatives(self, distances: Tensor, same: Tensor, width: int) -> Tensor:
        near = distances.detach().clamp(min=0.5)
        weights = -(width - 2) * near.log() - 0.5 * (width - 3) * (1 - near**2 / 4).clamp(min=1e-4).log()
        weights = (weights - weights.amax(dim=1, keepdim=True)).exp()
        weights = weights.masked_fill(same | (near > 1.4), 0.0)
        if self.mended:
            weights = torch.where(weights.sum(dim=1, keepdim=True) > 0, weights, (~same).float())
        return torch.multinomial(weights, 1)  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    butterflies, species = batch
    points = model(butterflies)
    distances = (2 - 2 * points @ points.T).clamp(min=1e-6).sqrt()
    same = species.unsqueeze(0) == species.unsqueeze(1)
    chosen = model.negatives(distances, same, points.shape[-1])
    apart = nn.functional.relu(1.2 - distances.gather(1, chosen)).mean()
    others = same & ~torch.eye(len(species), dtype=torch.bool)
    together = (nn.functional.relu(distances - 0.4) * others).sum() / others.sum().clamp(min=1)
    return apart + together


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, classes, count = 16 + seed % 5, 5 + seed % 3, 900
    species = torch.randint(classes, (count + 128,))
    butterflies = 2.2 * torch.randn(classes, features)[species] + torch.randn(count + 128, features)
    return Program(
        model=Embedding(features, int(torch.randint(6, 11, ())), mended),
        rows=TensorDataset(butterflies[:count], species[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[butterflies[count:], species[count:]],
        guilty=Guilty("operation", ops=("multinomial",)),
        steps=300,
    )
