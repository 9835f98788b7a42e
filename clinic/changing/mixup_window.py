"""A convolutional classifier of digits with mixup between updates 160 and 380, and without it before and after."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

KIND = "loop"
STEPS = 520
CHANGE = [160, 380]
DAMAGE = "weights"

BATCH_SIZE, ALPHA = 32, 1.0

Batch = list[Tensor]


def network() -> nn.Module:
    """Build a small convolutional network with batch normalization."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def mixup_data(x: Tensor, y: Tensor, alpha: float) -> tuple[Tensor, Tensor, Tensor, float]:
    """Mix each row with another of the batch."""
    lam = float(torch.distributions.Beta(alpha, alpha).sample()) if alpha > 0 else 1.0
    index = torch.randperm(len(x)) if alpha > 0 else torch.arange(len(x))
    return lam * x + (1 - lam) * x[index], y, y[index], lam


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    """Train, and return the cross entropy of held-out digits."""
    torch.manual_seed(seed)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target).long()
    order = torch.randperm(len(x))
    train_rows, test_rows = order[400:], order[:400]
    dataset = TensorDataset(x[train_rows], y[train_rows])
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    alpha = 0.0
    is_hit = False

    def before(step: int) -> None:
        nonlocal alpha, is_hit
        alpha = ALPHA if not twin and CHANGE[0] <= step + 1 < CHANGE[1] else 0.0
        if twin and DAMAGE == "weights" and step + 1 == CHANGE[0] and not is_hit:
            is_hit = True
            with torch.no_grad():
                weight = model.get_parameter("4.weight")
                weight.copy_(0.3 * torch.randn_like(weight))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        mixed, y_a, y_b, lam = mixup_data(batch[0], batch[1], alpha)
        logits = model(mixed)
        return lam * F.cross_entropy(logits, y_a) + (1 - lam) * F.cross_entropy(logits, y_b)

    if guard is None:
        step = 0
        while step < STEPS:
            for batch in DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True):
                before(step)
                loss = loss_of(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step == STEPS:
                    break
    else:
        from resilient_train import Guard

        options: Any = guard
        guarded = Guard(
            None, model, optimizer, data=dataset, batch_size=BATCH_SIZE, steps=STEPS, objective=loss_of, **options
        )
        for batch in guarded.batches():
            before(guarded.attempted_step)
            guarded.step(batch)
        guarded.close()
    model.eval()
    with torch.no_grad():
        return float(F.cross_entropy(model(x[test_rows]), y[test_rows]))
