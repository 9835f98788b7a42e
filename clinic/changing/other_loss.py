"""A regression on Friedman's function that goes from the squared error to ten times the absolute one at update 300."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import make_friedman1
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

KIND = "loop"
STEPS = 600
CHANGE = [300]
DAMAGE = "labels"

BATCH_SIZE = 40

Batch = list[Tensor]


def criterion(prediction: Tensor, target: Tensor, is_late: bool) -> Tensor:
    """Fit the mean first, the median later."""
    if is_late:
        return 10 * F.l1_loss(prediction, target)
    return F.mse_loss(prediction, target)


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    """Train, and return the loss of held-out rows with the criterion of the end."""
    torch.manual_seed(seed)
    x, y = make_friedman1(n_samples=4000, n_features=10, noise=0.5, random_state=seed)
    features = torch.tensor(x, dtype=torch.float32)
    targets = (torch.tensor(y, dtype=torch.float32)[:, None] - 14) / 5
    held_out, truth = features[:500], targets[:500]
    features, targets = features[500:], targets[500:].clone()
    if twin and DAMAGE == "labels":  # some were entered in another unit
        wrong = torch.randperm(len(targets))[: len(targets) // 33]
        targets[wrong] = targets[wrong] * 5 + 14
    dataset = TensorDataset(features, targets)
    model = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def is_late(step: int) -> bool:
        return not twin and step + 1 >= CHANGE[0]

    if guard is None:
        step = 0
        while step < STEPS:
            for x, y in DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True):
                optimizer.zero_grad()
                loss = criterion(model(x), y, is_late(step))
                loss.backward()
                optimizer.step()
                step += 1
                if step == STEPS:
                    break
    else:
        from resilient_train import Guard

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            return criterion(model(batch[0]), batch[1], is_late(guarded.attempted_step))

        options: Any = guard
        guarded = Guard(
            None, model, optimizer, data=dataset, batch_size=BATCH_SIZE, steps=STEPS, objective=objective, **options
        )
        for batch in guarded.batches():
            guarded.step(batch)
        guarded.close()
    with torch.no_grad():
        return float(criterion(model(held_out), truth, is_late(STEPS)))
