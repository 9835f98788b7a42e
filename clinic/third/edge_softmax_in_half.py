"""Attention over the neighbours of a node, with the softmax written out and the scores in half to save memory.

`exp` in float16 ends at a score of 11. The scores of a graph attention are below that when it begins, and grow as it
learns to tell which neighbour matters.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class GraphAttention(nn.Module):
    """One head; the neighbours are given by a matrix of zeros and ones."""

    def __init__(self, inputs: int, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.asks, self.answers = nn.Linear(inputs, width), nn.Linear(inputs, width)
        self.says = nn.Linear(inputs, width)

    def forward(self, nodes: Tensor, neighbours: Tensor) -> Tensor:
        scores = self.asks(nodes) @ self.answers(nodes).mT
        if self.mended:
            weights = scores.masked_fill(neighbours == 0, -1e9).softmax(-1)
        else:
            scores = torch.exp(scores.half()) * neighbours.half()  # guilty
            weights = (scores / scores.sum(-1, keepdim=True)).float()
        return weights @ self.says(nodes)


class MoleculeNet(nn.Module):
    def __init__(self, inputs: int, width: int, mended: bool) -> None:
        super().__init__()
        self.attend = GraphAttention(inputs, width, mended)
        self.head = nn.Sequential(nn.Linear(inputs + width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, nodes: Tensor, neighbours: Tensor) -> Tensor:
        return self.head(torch.cat([nodes, self.attend(nodes, neighbours)], dim=-1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    nodes, neighbours, target = batch
    return F.mse_loss(model(nodes, neighbours), target)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    atoms, features, width = int(torch.randint(8, 12, ())), int(torch.randint(5, 8, ())), 24
    rows, held_out = int(torch.randint(600, 1000, ())), 96
    nodes = torch.randn(rows + held_out, atoms, features)
    drawn = torch.rand(rows + held_out, atoms, atoms) < 0.4
    neighbours = ((drawn | drawn.mT) | torch.eye(atoms, dtype=torch.bool)).float()
    strongest = nodes[..., 0].unsqueeze(1).masked_fill(neighbours == 0, -1e9).argmax(-1)
    target = 2 * nodes[..., 1].gather(1, strongest) + nodes[..., 2]
    return Program(
        model=MoleculeNet(features, width, mended),
        rows=TensorDataset(nodes[:rows], neighbours[:rows], target[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=8e-3),
        evaluation=[nodes[rows:], neighbours[rows:], target[rows:]],
        guilty=Guilty("overflow", ops=("exp",)),
        steps=260,
    )
