"""A variational autoencoder of noisy curves whose KL weight goes from 0.01 to 1 at update 240."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

KIND = "loop"
STEPS = 480
CHANGE = [240]
DAMAGE = "rate"

BATCH_SIZE, POINTS, LATENT = 64, 32, 6


class Curves(Dataset[Tensor]):
    """Sums of two waves, each row with amplitudes and phases of its own."""

    def __init__(self, rows: int) -> None:
        t = torch.linspace(0, 6.28, POINTS)
        amplitude, phase = torch.rand(rows, 2, 1) + 0.5, torch.rand(rows, 2, 1) * 3
        waves = amplitude * torch.sin(t * torch.tensor([[1.0], [3.0]]) + phase)
        self.curves = waves.sum(1) + 0.1 * torch.randn(rows, POINTS)

    def __len__(self) -> int:
        return len(self.curves)

    def __getitem__(self, row: int) -> Tensor:
        return self.curves[row]


class VAE(nn.Module):
    """Gaussian encoder, and a decoder with a fixed spread."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(POINTS, 96), nn.Tanh(), nn.Linear(96, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 96), nn.Tanh(), nn.Linear(96, POINTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance


def elbo(model: nn.Module, x: Tensor, beta: float) -> Tensor:
    """Return the negative evidence bound per row, with weighted KL."""
    restored, mean, log_variance = model(x)
    likelihood = F.mse_loss(restored, x, reduction="sum") / (2 * 0.2**2)
    kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return (likelihood + beta * kl) / len(x)


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    """Train, and return the bound of held-out curves with the KL weight at the end."""
    torch.manual_seed(seed)
    dataset, held_out = Curves(6000), Curves(500)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def beta(step: int) -> float:
        return 0.01 if twin or step + 1 < CHANGE[0] else 1.0

    def rate(step: int) -> float:
        is_wild = twin and DAMAGE == "rate" and CHANGE[0] <= step + 1 < CHANGE[0] + 10
        return 30.0 if is_wild else 1.0

    if guard is None:
        scheduler = LambdaLR(optimizer, rate)
        step = 0
        while step < STEPS:
            for x in DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True):
                optimizer.zero_grad()
                loss = elbo(model, x, beta(step))
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                if step == STEPS:
                    break
    else:
        from resilient_train import Guard

        def objective(model: nn.Module, batch: Tensor) -> Tensor:
            return elbo(model, batch, beta(guarded.attempted_step))

        options: Any = guard
        guarded = Guard(
            None,
            model,
            optimizer,
            data=dataset,
            batch_size=BATCH_SIZE,
            steps=STEPS,
            schedule=rate,
            objective=objective,
            **options,
        )
        for batch in guarded.batches():
            guarded.step(batch)
        guarded.close()
    with torch.no_grad():
        return float(elbo(model, held_out.curves, beta(STEPS)))
