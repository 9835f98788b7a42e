"""Predicted atoms are laid over the true ones by Kabsch's rotation, and the gradient goes through the decomposition.

A linear molecule leaves two singular values that are both zero, and the derivative of `svd` divides by the difference
of their squares. Known from protein and ligand models; the rotation needs no gradient at all.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Conformer(nn.Module):
    def __init__(self, features: int, width: int, atoms: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.body = nn.Sequential(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, 3 * atoms))

    def forward(self, molecules: Tensor) -> Tensor:
        return self.body(molecules).unflatten(-1, (-1, 3))

    def rotation(self, predicted: Tensor, true: Tensor) -> Tensor:
        covariance = predicted.mT @ true
        if self.mended:
            covariance = covariance.detach()
        u, _, vh = torch.linalg.svd(covariance)  # guilty
        handed = torch.linalg.det(u @ vh).sign()
        turn = torch.diag_embed(torch.stack([torch.ones_like(handed), torch.ones_like(handed), handed], dim=-1))
        return u @ turn @ vh


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    molecules, true = batch
    predicted = model(molecules)
    predicted = predicted - predicted.mean(dim=1, keepdim=True)
    true = true - true.mean(dim=1, keepdim=True)
    aligned = predicted @ model.rotation(predicted, true)
    return (aligned - true).square().sum(dim=-1).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, atoms, count = 5 + seed % 3, 5 + seed % 4, 800
    molecules = torch.randn(count + 128, features)
    rest = 1.5 * torch.randn(atoms, 3)
    bent = molecules @ torch.randn(features, 3 * atoms) / features**0.5
    true = rest + 0.7 * torch.tanh(bent).unflatten(-1, (-1, 3))
    linear = torch.randperm(count)[: 4 + seed % 5]
    true[linear] = 0
    true[linear, :, 2] = 1.2 * torch.arange(atoms)
    return Program(
        model=Conformer(features, int(torch.randint(32, 64, ())), atoms, mended),
        rows=TensorDataset(molecules[:count], true[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[molecules[count:], true[count:]],
        guilty=Guilty("operation", ops=("svd", "linalg_svd")),
        steps=300,
    )
