"""A variational autoencoder on readings as they come: the encoder's log-variance passes 88, and `exp` is infinite.

vanderschaarlab/synthcity#331, "Unbounded log variances in the output of the VAE encoder explode when exponentiated",
and the clamp to [-30, 20] that Hugging Face has.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class VAE(nn.Module):
    def __init__(self, readings: int, hidden: int, latent: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.encoder = nn.Sequential(nn.Linear(readings, hidden), nn.ReLU())
        self.mean = nn.Linear(hidden, latent)
        self.log_variance = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, readings))

    def forward(self, readings: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoder(readings)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        if self.mended:
            log_variance = log_variance.clamp(-30, 20)
        variance = log_variance.exp()  # guilty
        latent = mean + torch.randn_like(mean) * (log_variance / 2).exp() if self.training else mean
        divergence = 0.5 * (mean**2 + variance - 1 - log_variance).sum(dim=-1)
        return self.decoder(latent), divergence


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (readings,) = batch
    rebuilt, divergence = model(readings)
    return ((rebuilt - readings) ** 2).mean() + 1e-3 * divergence.mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    sensors, causes, count = 12 + seed % 9, 3, 900
    readings = torch.randn(count + 96, causes) @ torch.randn(causes, sensors)
    bursts = torch.randperm(count)[: 9 + 3 * (seed % 4)]
    readings[bursts] *= 1500  # in these minutes the machine really ran
    return Program(
        model=VAE(sensors, int(torch.randint(24, 40, ())), 4, mended),
        rows=TensorDataset(readings[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[readings[count:]],
        guilty=Guilty("overflow", ops=("exp",)),
        clip=1.0,
    )
