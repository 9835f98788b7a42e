"""A small residual network tells the direction of stripes in pictures of 10 pixels, and of 20 from update 230 on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

KIND = "loop"
STEPS = 460
CHANGE = [230]
DAMAGE = "rate"

BATCH_SIZE, DIRECTIONS = 24, 6
SMALL, LARGE = 10, 20


def stripes(rows: int) -> tuple[Tensor, Tensor]:
    """Draw noisy stripes of random width in one of six directions."""
    y = torch.randint(DIRECTIONS, (rows,))
    angle = (y + 0.3 * (torch.rand(rows) - 0.5))[:, None, None] * torch.pi / DIRECTIONS
    down, right = torch.meshgrid(torch.linspace(-1, 1, LARGE), torch.linspace(-1, 1, LARGE), indexing="ij")
    width = 4 + 5 * torch.rand(rows, 1, 1)
    wave = torch.sin(width * (angle.cos() * right + angle.sin() * down) + 6.28 * torch.rand(rows, 1, 1))
    return (wave + 0.7 * torch.randn(rows, LARGE, LARGE))[:, None], y


class Block(nn.Module):
    """Add what a convolution finds."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


def network() -> nn.Module:
    """Build a network that takes any size."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        Block(16),
        Block(16),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(16, DIRECTIONS),
    )


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    """Train, and return the cross entropy of held-out pictures of the last size."""
    torch.manual_seed(seed)
    x, y = stripes(3400)
    dataset, held_out, targets = TensorDataset(x[400:], y[400:]), x[:400], y[:400]
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)

    def size(step: int) -> int:
        return SMALL if twin or step + 1 < CHANGE[0] else LARGE

    def rate(step: int) -> float:
        warm = min(1.0, (step + 1) / 20)
        is_wild = twin and DAMAGE == "rate" and CHANGE[0] <= step + 1 < CHANGE[0] + 12
        return warm * (50.0 if is_wild else 1.0)

    def resized(x: Tensor, step: int) -> Tensor:
        if x.shape[-1] == size(step):
            return x
        return F.interpolate(x, size=(size(step), size(step)), mode="bilinear", align_corners=False, antialias=True)

    if guard is None:
        step = 0
        while step < STEPS:
            for x, y in DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True):
                for group in optimizer.param_groups:
                    group["lr"] = 4e-3 * rate(step)
                loss = F.cross_entropy(model(resized(x, step)), y)
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
            None, model, optimizer, data=dataset, batch_size=BATCH_SIZE, steps=STEPS, schedule=rate, **options
        )
        for x, y in guarded.batches():
            loss = F.cross_entropy(model(resized(x, guarded.attempted_step)), y)
            loss.backward()
            guarded.update(loss)
        guarded.close()
    with torch.no_grad():
        return float(F.cross_entropy(model(resized(held_out, STEPS)), targets))
