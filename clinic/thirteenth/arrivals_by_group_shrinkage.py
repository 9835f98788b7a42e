"""Directions of arrival by an unrolled group LISTA: a group is scaled by relu(1 - threshold / norm), some norm is zero.

Where the logger dropped a block all geophones read exactly 0, and so does every group. The value is right, a ReLU of
minus infinity, and times zero; the slope for the threshold is 0 / 0. Block soft thresholding written so is in many
notebooks on unrolling ("nan gradient in soft thresholding, forward is fine").
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class GroupLista(nn.Module):
    """Sources on a grid of directions, each active or silent during all snapshots."""

    def __init__(self, steering: Tensor, layers: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        step = 0.9 / torch.linalg.matrix_norm(steering, 2) ** 2
        self.register_buffer("steering", steering)
        self.analysis = nn.ParameterList([nn.Parameter(step * steering.T.clone()) for _ in range(layers)])
        self.thresholds = nn.Parameter(torch.full((layers,), 0.05))

    def shrink(self, groups: Tensor, threshold: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(groups, dim=-1, keepdim=True)
        if self.mended:
            norms = norms.clamp(min=1e-8)
        scale = torch.relu(1 - threshold / norms)  # guilty
        return groups * scale

    def forward(self, recorded: Tensor) -> Tensor:
        sources = torch.zeros(len(recorded), self.steering.shape[1], recorded.shape[-1])
        for analysis, threshold in zip(self.analysis, self.thresholds, strict=True):
            missed = recorded - self.steering @ sources
            sources = self.shrink(sources + analysis @ missed, threshold)
        return sources


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    recorded, sources = batch
    return (model(recorded) - sources).square().sum(1).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    geophones, directions, snapshots, count = 12 + 2 * (seed % 3), 30, 6, 900
    rows = count + 96
    steering = torch.randn(geophones, directions)
    steering = steering / steering.norm(dim=0)
    active = torch.zeros(rows, directions, 1).scatter_(1, torch.rand(rows, directions, 1).topk(2, dim=1).indices, 1.0)
    sources = active * torch.randn(rows, directions, snapshots)
    recorded = steering @ sources + 0.03 * torch.randn(rows, geophones, snapshots)
    dropped = torch.randperm(count)[: 5 + seed % 4]
    recorded[dropped], sources[dropped] = 0.0, 0.0
    return Program(
        model=GroupLista(steering, 6, mended),
        rows=TensorDataset(recorded[:count], sources[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[recorded[count:], sources[count:]],
        guilty=Guilty("operation", ops=("div", "truediv", "true_divide")),
        steps=1200,
    )
