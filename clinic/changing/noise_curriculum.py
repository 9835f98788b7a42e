"""A GRU that cleans waves; rows come in order of difficulty, and from update 220 on they carry five times the noise."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

KIND = "loop"
STEPS = 440
CHANGE = [220]
DAMAGE = "labels"

BATCH_SIZE, LENGTH = 24, 16
EASY, HARD = 0.2, 1.0
WRONG_UPDATES = 20


def waves(rows: int) -> Tensor:
    """Draw clean waves with frequencies of their own."""
    t = torch.arange(LENGTH) * 0.4
    return torch.sin(t * (0.5 + torch.rand(rows, 1)) + 6.28 * torch.rand(rows, 1))


class Cleaner(nn.Module):
    """Read the noisy wave, and say what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 32, batch_first=True)
        self.out = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.gru(x[..., None])
        y: Tensor = self.out(hidden)[..., 0]
        return y


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    """Train, and return the error on held-out waves with the noise of the last stage."""
    torch.manual_seed(seed)
    clean = waves(STEPS * BATCH_SIZE)
    noise = torch.full((len(clean), 1), EASY)
    first = (CHANGE[0] - 1) * BATCH_SIZE
    if not twin:
        noise[first:] = HARD
    noisy = clean + noise * torch.randn_like(clean)
    targets = clean.clone()
    if twin and DAMAGE == "labels":  # a file of the recording was joined with the wrong channel
        rows = slice(first, first + WRONG_UPDATES * BATCH_SIZE)
        targets[rows] = 0.6 * clean[rows].roll(1, 0)
    loader = DataLoader(TensorDataset(noisy, targets), batch_size=BATCH_SIZE, shuffle=False)
    model = Cleaner()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    if guard is None:
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        from resilient_train import Guard

        options: Any = guard
        guarded = Guard(None, model, optimizer, data=loader, steps=STEPS, **options)
        for x, y in guarded.batches():
            loss = F.mse_loss(model(x), y)
            loss.backward()
            guarded.update(loss)
        guarded.close()
    with torch.no_grad():
        fresh = waves(400)
        return float(F.mse_loss(model(fresh + (EASY if twin else HARD) * torch.randn_like(fresh)), fresh))
