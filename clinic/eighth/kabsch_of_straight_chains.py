"""Predicted atoms are laid over the measured ones by Kabsch's rotation; for a straight chain it has no derivative.

The singular value decomposition of a covariance of rank one has two equal singular values, zero, and its gradient is
NaN or enormous. Known from losses for structures of proteins and small molecules; those who know it take the rotation
as given and let no gradient through.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Folder(nn.Module):
    def __init__(self, features: int, width: int, atoms: int, mended: bool) -> None:
        super().__init__()
        self.atoms, self.mended = atoms, mended
        self.body = nn.Sequential(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.head = nn.Linear(width, 3 * atoms)

    def forward(self, sequences: Tensor) -> Tensor:
        places = self.head(self.body(sequences)).view(-1, self.atoms, 3)
        return places - places.mean(dim=1, keepdim=True)

    def rotation(self, places: Tensor, measured: Tensor) -> Tensor:
        covariance = places.transpose(1, 2) @ measured
        if self.mended:
            covariance = covariance.detach()
        left, _, right = torch.linalg.svd(covariance)  # guilty
        flip = torch.det(left @ right).sign()
        signs = torch.stack([torch.ones_like(flip), torch.ones_like(flip), flip], dim=-1)
        return left @ (signs.unsqueeze(-1) * right)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    sequences, measured = batch
    places = model(sequences)
    return ((places @ model.rotation(places, measured) - measured) ** 2).sum(dim=-1).mean()


def turned(places: Tensor) -> Tensor:
    """Turn each molecule at random, as it lies in its file."""
    return places @ torch.linalg.qr(torch.randn(len(places), 3, 3))[0]


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, atoms, count = 8 + seed % 4, 5 + seed % 2, 800
    sequences = torch.randn(count + 96, features)
    bend = 0.8 * torch.tanh(sequences[:, :2] @ torch.randn(2, atoms))
    along = torch.arange(atoms).float().expand(count + 96, atoms)
    places = torch.stack([along * (1 + 0.2 * sequences[:, 2:3].tanh()), bend, bend.roll(1, dims=1) ** 2], dim=-1)
    straight = torch.randperm(count)[: 6 + 2 * (seed % 3)]
    measured = turned(places)
    measured[straight] = places[straight] * torch.tensor([1.0, 0.0, 0.0])  # written along the axis, as in textbooks
    measured = measured - measured.mean(dim=1, keepdim=True)
    return Program(
        model=Folder(features, int(torch.randint(32, 49, ())), atoms, mended),
        rows=TensorDataset(sequences[:count], measured[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[sequences[count:], measured[count:]],
        guilty=Guilty("operation", ops=("linalg_svd", "svd")),
        steps=300,
    )
