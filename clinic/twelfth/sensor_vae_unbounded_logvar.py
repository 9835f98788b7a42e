"""A VAE whose log-variance is a plain linear layer: one exponential of it, and the KL term is infinite.

The inputs are the counts of a 10-bit sensor that nobody divided by 1023, so that the encoder answers with
log-variances in the hundreds.
"VAE loss is NaN", "KL divergence is inf" are among the most asked questions on VAEs; mended by a clamp of the
log-variance (Stable Diffusion's autoencoder has one: -30 to 20).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class GreyVae(nn.Module):
    def __init__(self, pixels: int, width: int, latent: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.encoder = nn.Sequential(nn.Linear(pixels, width), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(width, latent), nn.Linear(width, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, pixels))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoder(images)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        if self.mended:
            log_variance = log_variance.clamp(-20.0, 4.0)
        deviation = (0.5 * log_variance).exp()  # guilty
        code = mean + deviation * torch.randn_like(mean) if self.training else mean
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)  # guilty
        return self.decoder(code), divergence


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (images,) = batch
    told, divergence = model(images)
    return (0.5 * ((told - images) / 80.0).square().sum(-1) + divergence).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, latent, count = 6 + seed % 3, 4, 900
    grid = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).flatten(0, 1)
    centre = side * torch.rand(count + 96, 1, 2)
    blots = torch.exp(-(grid - centre).square().sum(-1) / (2 * (0.25 * side) ** 2))
    images = (1000 * blots + 24 * torch.randn(blots.shape)).round().clamp(0, 1023)
    return Program(
        model=GreyVae(side * side, int(torch.randint(40, 64, ())), latent, mended),
        rows=TensorDataset(images[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[images[count:]],
        guilty=Guilty("overflow", ops=("exp",)),
        steps=300,
    )
