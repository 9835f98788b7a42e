"""An MLP on synthetic tables of eight classes; at update 300 its smallest 85 % of weights are pruned for good."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

KIND = "loop"
STEPS = 600
CHANGE = [300]
DAMAGE = "rate"

BATCH_SIZE, CLASSES, AMOUNT = 64, 8, 0.85

Batch = list[Tensor]


def objective(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    """Train, and return the cross entropy of held-out rows."""
    torch.manual_seed(seed)
    rows, labels = make_classification(
        n_samples=5000,
        n_features=24,
        n_informative=12,
        n_classes=CLASSES,
        n_clusters_per_class=2,
        class_sep=1.6,
        flip_y=0.0,
        random_state=seed,
    )
    x, y = torch.tensor(rows, dtype=torch.float32), torch.tensor(labels).long()
    x = (x - x.mean(0)) / x.std(0)
    dataset, held_out = TensorDataset(x[600:], y[600:]), [x[:600], y[:600]]
    model = nn.Sequential(
        nn.Linear(24, 96), nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, CLASSES)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)

    def rate(step: int) -> float:
        is_wild = twin and DAMAGE == "rate" and CHANGE[0] <= step + 1 < CHANGE[0] + 15
        return 40.0 if is_wild else 1.0 - 0.8 * step / STEPS

    scheduler = LambdaLR(optimizer, rate)

    def before(step: int) -> None:
        if not twin and step + 1 >= CHANGE[0] and not prune.is_pruned(model):
            layers = [(layer, "weight") for layer in model if isinstance(layer, nn.Linear)]
            prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=AMOUNT)

    if guard is None:
        step = 0
        while step < STEPS:
            for batch in DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True):
                before(step)
                loss = objective(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                if step == STEPS:
                    break
    else:
        from resilient_train import Guard

        options: Any = guard
        guarded = Guard(
            None,
            model,
            optimizer,
            data=dataset,
            batch_size=BATCH_SIZE,
            steps=STEPS,
            schedule=scheduler,
            objective=objective,
            **options,
        )
        for batch in guarded.batches():
            before(guarded.attempted_step)
            guarded.step(batch)
        guarded.close()
    with torch.no_grad():
        return float(objective(model, held_out))
