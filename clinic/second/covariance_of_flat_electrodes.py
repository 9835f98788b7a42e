"""The slope of an eigendecomposition divides by the gaps between eigenvalues, and two flat electrodes have none.

Classification of EEG by the matrix logarithm of covariances, as in Riemannian networks. Sessions with the small cap
leave the last two channels at zero; the usual shrinkage makes the matrix positive definite, but not its eigenvalues
distinct.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

SHRINKAGE = 1e-2


def matrix_logarithm(matrices: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrices)  # guilty
    return torch.einsum("bij,bj,bkj->bik", vectors, values.log(), vectors)


class CovarianceNet(nn.Module):
    """Learned gains of the electrodes, and a linear classifier in the tangent space."""

    def __init__(self, electrodes: int, classes: int, mended: bool) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.ones(electrodes))
        corner = torch.triu_indices(electrodes, electrodes)
        self.classify = nn.Linear(corner.shape[1], classes)
        self.corner = corner
        shrinkage = torch.full((electrodes,), SHRINKAGE)
        if mended:  # a different amount for each electrode, so that no two eigenvalues coincide
            shrinkage = shrinkage * torch.linspace(1, 2, electrodes)
        self.shrinkage = shrinkage.diag()

    def forward(self, signals: Tensor) -> Tensor:
        signals = signals * self.gains.unsqueeze(-1)
        covariance = signals @ signals.mT / signals.shape[-1]
        logarithm = matrix_logarithm(covariance + self.shrinkage)
        return self.classify(logarithm[:, self.corner[0], self.corner[1]])


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    signals, task = batch
    return nn.functional.cross_entropy(model(signals), task)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    electrodes, samples, classes = int(torch.randint(7, 10, ())), int(torch.randint(48, 72, ())), 4
    trials, held_out = int(torch.randint(500, 800, ())), 128
    task = torch.randint(classes, (trials + held_out,))
    power = torch.ones(trials + held_out, electrodes)
    power[torch.arange(len(task)), task] = 1.8
    mixing = torch.eye(electrodes) + 0.2 * torch.randn(electrodes, electrodes)
    signals = torch.einsum("ij,bjt->bit", mixing, power.unsqueeze(-1) * torch.randn(len(task), electrodes, samples))
    small_cap = torch.rand(trials + held_out) < 0.25
    signals[small_cap, -2:] = 0
    return Program(
        model=CovarianceNet(electrodes, classes, mended),
        rows=TensorDataset(signals[:trials], task[:trials]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[signals[trials:], task[trials:]],
        guilty=Guilty("operation", ops=("linalg_eigh", "eigh")),
        steps=200,
    )
