"""A training loop as one writes it with Accelerate, and the same with a guard around it, in both forms.

    python examples/accelerate_loop.py             # all three, one after the other
    python examples/accelerate_loop.py guarded     # one of plain, guarded, handed_over

Two things are rotten here on purpose: two of the readings are NaN, and once a backward pass goes wrong. The plain
loop ends with NaN weights. The guarded ones say what they met, get over it, and end with a model that works.
The lines that the guard adds are marked with `# +`; what it takes over is gone.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset

from resilient_train import Guard  # +

ROWS, ROTTEN = 6000, {100, 4510}
SPOILED = 150  # the backward pass that goes wrong
EPOCHS, BATCH_SIZE = 2, 32
STEPS = EPOCHS * math.ceil(ROWS / BATCH_SIZE)


class Readings(Dataset[tuple[Tensor, Tensor]]):
    """Eight sensors, and what they should tell."""

    def __init__(self, rows: int, seed: int, rotten: set[int] | None = None) -> None:
        numbers = torch.Generator().manual_seed(seed)
        self.x = torch.randn(rows, 8, generator=numbers)
        self.y = self.x.sin().sum(1, keepdim=True)
        self.x[sorted(rotten or ())] = math.nan

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.y[row]


def build() -> tuple[nn.Module, torch.optim.Optimizer, CosineAnnealingLR]:
    """Build what all three loops train with."""
    torch.manual_seed(0)
    last = nn.Linear(64, 1)
    spoil_once(last.weight)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, CosineAnnealingLR(optimizer, STEPS)


def spoil_once(weight: Tensor) -> None:
    """Let one backward pass go wrong."""
    passes = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal passes
        passes += 1
        return gradient * math.nan if passes == SPOILED else gradient

    weight.register_hook(hook)  # type: ignore[no-untyped-call]


def plain() -> Any:
    """Train, and hope."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = build()
    loader = DataLoader(Readings(ROWS, seed=1, rotten=ROTTEN), batch_size=BATCH_SIZE, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for _ in range(EPOCHS):
        for x, y in loader:
            loss = mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


def guarded(run_dir: Path) -> Any:
    """Give the guard the objective: it makes forward, backward and update."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = build()
    dataset = Readings(ROWS, seed=1, rotten=ROTTEN)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:  # +
        x, y = batch  # +
        return mse_loss(model(x), y)  # +

    guard = Guard(accelerator, model, optimizer, data=dataset, batch_size=BATCH_SIZE, steps=STEPS,  # +
                  schedule=scheduler, objective=objective, run_dir=run_dir)  # +  # fmt: skip
    for batch in guard.batches():  # +
        guard.step(batch)  # +
    return model


def handed_over(run_dir: Path) -> Any:
    """Keep forward and backward, and hand over the loss: for loops with a structure of their own."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = build()
    dataset = Readings(ROWS, seed=1, rotten=ROTTEN)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    guard = Guard(accelerator, model, optimizer, data=dataset, batch_size=BATCH_SIZE,  # +
                  schedule=scheduler, run_dir=run_dir)  # +  # fmt: skip
    for epoch in guard.epochs(EPOCHS):  # +
        for x, y in epoch:  # +
            loss = mse_loss(model(x), y)
            accelerator.backward(loss)
            guard.update(loss)  # +
    return model


@torch.no_grad()
def report(name: str, model: nn.Module) -> bool:
    """Print what became of a model, and say whether it is whole."""
    model.eval()
    fresh = Readings(500, seed=2)
    is_finite = all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
    error = mse_loss(model(fresh.x), fresh.y).item()
    print(f"{name}: weights {'finite' if is_finite else 'NOT finite'}, error on fresh readings {error:.3f}", flush=True)
    return is_finite


def main(names: list[str]) -> None:
    """Run the loops that are named."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names or ["plain", "guarded", "handed_over"]:
            print(f"\n{name}", flush=True)
            if name == "plain":
                report(name, plain())
            else:
                train = {"guarded": guarded, "handed_over": handed_over}[name]
                assert report(name, train(Path(folder) / name))


if __name__ == "__main__":
    main(sys.argv[1:])
