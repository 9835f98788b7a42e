"""Some scans were enlarged by bicubic interpolation, which overshoots at edges: their pixels leave [0, 1] by a little.

A variational autoencoder with the continuous Bernoulli likelihood: "ValueError: Expected value argument to be within
the support (Interval(lower_bound=0.0, upper_bound=1.0))". Asked wherever images are resized as tensors.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import ContinuousBernoulli, Normal, kl_divergence
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Autoencoder(nn.Module):
    def __init__(self, pixels: int, width: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, pixels))

    def forward(self, images: Tensor) -> tuple[Normal, Tensor]:
        mean, spread = self.encoder(images).chunk(2, dim=-1)
        posterior = Normal(mean, nn.functional.softplus(spread) + 1e-3)
        return posterior, self.decoder(posterior.rsample())


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images = batch[0].flatten(1)
    posterior, logits = model(images)
    likelihood = ContinuousBernoulli(logits=logits).log_prob(images).sum(dim=-1)
    prior = Normal(torch.zeros(()), torch.ones(()))
    return (kl_divergence(posterior, prior).sum(dim=-1) - likelihood).mean() / images.shape[-1]


def strokes(count: int, side: int) -> Tensor:
    """Draw a thick line each, whose darkness falls off smoothly."""
    angle, offset = 3.1416 * torch.rand(count, 1, 1), 0.6 * torch.rand(count, 1, 1) - 0.3
    along = torch.linspace(-1, 1, side)
    distance = angle.cos() * along.unsqueeze(0) + angle.sin() * along.unsqueeze(1) - offset
    return torch.sigmoid(12 * (0.3 - distance.abs()))


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, count = 12 + 2 * (seed % 3), 800
    images = strokes(count + 128, side)
    small = torch.randperm(count)[: 4 + seed % 4].sort().values
    thumbnails = strokes(len(small), side // 2).round().unsqueeze(1)
    enlarged = nn.functional.interpolate(thumbnails, size=(side, side), mode="bicubic").squeeze(1)
    images[small] = enlarged.clamp(0, 1) if mended else enlarged
    return Program(
        model=Autoencoder(side * side, int(torch.randint(48, 80, ())), 4),
        rows=TensorDataset(images[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[images[count:]],
        guilty=Guilty("data", rows=tuple(small.tolist())),
        steps=300,
    )
