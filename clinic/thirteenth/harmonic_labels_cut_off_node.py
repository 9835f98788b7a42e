"""Labels spread over a graph as a harmonic function, by solving with its Laplacian: a node without an edge is singular.

"linalg.solve: (Batch element 5): The solver failed because the input matrix is singular." One graph of the batch has
a member that wrote to nobody. A small number on the diagonal would do.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

KNOWN = 4


class Harmonic(nn.Module):
    """Weighs the edges of a graph by what is known of them, and lets labels flow over them until they rest."""

    def __init__(self, features: int, width: int, mended: bool) -> None:
        super().__init__()
        self.jitter = 1e-3 if mended else 0.0
        self.weigh = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, edges: Tensor, joined: Tensor, labels: Tensor) -> Tensor:
        weights = nn.functional.softplus(self.weigh(edges).squeeze(-1)) * joined
        weights = (weights + weights.mT) / 2
        laplacian = torch.diag_embed(weights.sum(-1) + self.jitter) - weights
        pull = weights[:, KNOWN:, :KNOWN] @ labels.unsqueeze(-1)
        return torch.linalg.solve(laplacian[:, KNOWN:, KNOWN:], pull).squeeze(-1)  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    edges, joined, labels, truth = batch
    return nn.functional.mse_loss(model(edges, joined, labels), truth)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    nodes, features, count = 10 + seed % 3, 3, 1600
    size = count + 96
    edges = torch.randn(size, nodes, nodes, features)
    edges = (edges + edges.transpose(1, 2)) / 2**0.5
    joined = (torch.rand(size, nodes, nodes) < 0.35).float().triu(1)
    ring = torch.arange(nodes)
    joined[:, ring[:-1], ring[1:]] = 1.0
    joined = joined + joined.mT
    lone = torch.randperm(count)[: 14 + seed % 5]
    who = torch.randint(KNOWN, nodes, lone.shape)
    joined[lone, who] = 0.0
    joined[lone, :, who] = 0.0
    labels = 3 * torch.randn(size, KNOWN)
    strength = torch.exp(1.8 * edges[..., 0] - edges[..., 1]) * joined
    laplacian = torch.diag_embed(strength.sum(-1) + 1e-3) - strength
    pull = strength[:, KNOWN:, :KNOWN] @ labels.unsqueeze(-1)
    truth = torch.linalg.solve(laplacian[:, KNOWN:, KNOWN:], pull).squeeze(-1)
    return Program(
        model=Harmonic(features, int(torch.randint(24, 41, ())), mended),
        rows=TensorDataset(edges[:count], joined[:count], labels[:count], truth[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[edges[count:], joined[count:], labels[count:], truth[count:]],
        guilty=Guilty("operation", ops=("linalg_solve", "solve")),
        steps=1800,
    )
