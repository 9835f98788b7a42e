"""The covariance of a Gaussian process without noise is singular as soon as a batch holds the same point twice.

An emulator of a simulator that is exact, so that nobody thought of noise. The base run was repeated for each campaign
of simulations; most batches hold it once at most, and the others make the Cholesky factorisation fail.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class DeepKernel(nn.Module):
    """A Laplace kernel on learned features of the parameters of a run."""

    def __init__(self, parameters: int, width: int, mended: bool) -> None:
        super().__init__()
        self.jitter = 1e-3 if mended else 0.0
        self.features = nn.Sequential(nn.Linear(parameters, width), nn.Tanh(), nn.Linear(width, 3))
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, runs: Tensor) -> Tensor:
        features = self.features(runs)
        distance = (features.unsqueeze(0) - features.unsqueeze(1)).abs().sum(-1)
        return self.log_scale.exp() * (torch.exp(-distance) + self.jitter * torch.eye(len(runs)))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The negative log-likelihood of the results of a batch of runs."""
    runs, results = batch
    root = torch.linalg.cholesky(model(runs))  # guilty
    whitened = torch.linalg.solve_triangular(root, results.unsqueeze(-1), upper=False)
    return 0.5 * whitened.square().mean() + root.diagonal().log().mean() + 0.5 * math.log(2 * math.pi)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    parameters, width = int(torch.randint(5, 9, ())), int(torch.randint(16, 32, ()))
    rows, held_out = int(torch.randint(500, 800, ())), 64
    runs = torch.rand(rows + held_out, parameters) * 2 - 1
    repeated = torch.randperm(rows)[: int(torch.randint(8, 13, ()))]
    runs[repeated] = runs[repeated[0]].clone()
    results = 2 * torch.sin(2 * runs[:, 0]) + runs[:, 1]
    return Program(
        model=DeepKernel(parameters, width, mended),
        rows=TensorDataset(runs[:rows], results[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[runs[rows:], results[rows:]],
        guilty=Guilty("operation", ops=("linalg_cholesky", "cholesky")),
        steps=200,
    )
