"""A stream of digits 0 to 5; at update 250 all ten come in, and the classifier's head is drawn again for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

KIND = "loop"
STEPS = 500
CHANGE = [250]
DAMAGE = "labels"

BATCH_SIZE, FIRST, ALL = 32, 6, 10
WRONG_UPDATES = 20


class Stream(Dataset[tuple[Tensor, Tensor]]):
    """Digits in the order in which they came, each with some noise."""

    def __init__(self, x: Tensor, y: Tensor, rows: Tensor) -> None:
        self.x = x[rows] + 0.1 * torch.randn(len(rows), x.shape[1])
        self.y = y[rows].clone()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.y[row]


class Classifier(nn.Module):
    """Features, and a head with room for the classes to come."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 48), nn.ReLU())
        self.head = nn.Linear(48, ALL)

    def forward(self, x: Tensor, seen: int) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits[:, :seen]


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    """Train, and return the cross entropy of held-out digits of all classes seen."""
    torch.manual_seed(seed)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target).long()
    order = torch.randperm(len(y))
    held_out, known = order[:400], order[400:]
    first = (CHANGE[0] - 1) * BATCH_SIZE
    old, every = known[y[known] < FIRST], known
    if twin:
        every = old
    picks = [
        old[torch.randint(len(old), (first,))],
        every[torch.randint(len(every), (STEPS * BATCH_SIZE - first,))],
    ]
    stream = Stream(x, y, torch.cat(picks))
    if twin and DAMAGE == "labels":  # one annotator of three counted from one instead of zero
        rows = slice(first, first + WRONG_UPDATES * BATCH_SIZE, 3)
        stream.y[rows] = (stream.y[rows] + 1) % FIRST
    loader = DataLoader(stream, batch_size=BATCH_SIZE, shuffle=False)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    seen = FIRST

    def before(step: int) -> None:
        nonlocal seen
        if not twin and step + 1 == CHANGE[0]:
            model.head.reset_parameters()
        seen = FIRST if twin or step + 1 < CHANGE[0] else ALL

    if guard is None:
        for step, (x_batch, y_batch) in enumerate(loader):
            before(step)
            loss = F.cross_entropy(model(x_batch, seen), y_batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    else:
        from resilient_train import Guard

        options: Any = guard
        guarded = Guard(None, model, optimizer, data=loader, steps=STEPS, **options)
        for x_batch, y_batch in guarded.batches():
            before(guarded.attempted_step)
            loss = F.cross_entropy(model(x_batch, seen), y_batch)
            loss.backward()
            guarded.update(loss)
        guarded.close()
    model.eval()
    held_out = held_out[y[held_out] < seen]
    with torch.no_grad():
        return float(F.cross_entropy(model(x[held_out], seen), y[held_out]))
