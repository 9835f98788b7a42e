"""A program with two things wrong with it, of which it says nothing: what a run makes of them.

    python examples/culprits.py
    python -m resilient_train incidents runs/culprits

Two rows are rotten, and a root meets zero, where it has no slope.
"""

from __future__ import annotations

import math

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from resilient_train import Guard

STEPS = 300


class Distances(nn.Module):
    """Learns how far points are from landmarks that it places itself."""

    def __init__(self, landmarks: int = 8) -> None:
        super().__init__()
        self.landmarks = nn.Parameter(torch.cat([torch.zeros(1, 3), torch.randn(landmarks - 1, 3)]))
        self.head = nn.Sequential(nn.Linear(landmarks, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, points: Tensor) -> Tensor:
        apart = points[:, None] - self.landmarks
        far = apart.pow(2).sum(-1).sqrt()
        told: Tensor = self.head(far).squeeze(-1)
        return told


def rows(count: int = 1024) -> TensorDataset:
    """Points and how far they are from the origin. Some lie there, where a landmark lies too; two are rotten."""
    points = 10 * torch.randn(count, 3)
    points[torch.randperm(count)[:40]] = 0.0
    labels = points.norm(dim=-1)
    points[[77, 401], 2] = math.nan
    return TensorDataset(points, labels)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    points, labels = batch
    return nn.functional.mse_loss(model(points), labels)


def main() -> None:
    torch.manual_seed(0)
    accelerator, model, data = Accelerator(cpu=True), Distances(), rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    guard = Guard(
        accelerator,
        accelerator.prepare(model),
        optimizer,
        data=data,
        batch_size=32,
        steps=STEPS,
        objective=loss,
        clip=1.0,
        run_dir="runs/culprits",
    )
    for batch in guard.batches():
        guard.step(batch)
    guard.close()
    print(f"{len(guard.incidents)} incidents; the last loss is {guard.newest.loss if guard.newest else math.nan:.4f}")


if __name__ == "__main__":
    main()
