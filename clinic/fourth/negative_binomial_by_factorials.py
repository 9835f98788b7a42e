"""Counts of RNA molecules under a negative binomial whose density is written as in the textbook, with gamma functions.

gamma(36) is more than float32 holds. Most genes have a handful of molecules in a cell, and the first batches are fine;
then comes a cell with forty of one kind, or the dispersion of a gene has grown: infinity over infinity. The mend is to
stay with logarithms.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class CellAutoencoder(nn.Module):
    """What share of a cell's molecules each gene has, and how dispersed the gene is."""

    def __init__(self, genes: int, width: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(genes, width), nn.ELU(), nn.Linear(width, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ELU(), nn.Linear(width, genes))
        self.log_dispersion = nn.Parameter(torch.zeros(genes))

    def forward(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.decoder(self.encoder(torch.log1p(counts))).softmax(-1)
        return counts.sum(-1, keepdim=True) * shares, self.log_dispersion.exp()


def gamma(x: Tensor) -> Tensor:
    return torch.exp(torch.lgamma(x))  # guilty


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    (counts,) = batch
    mean, spread = model(counts)
    success = mean / (mean + spread)
    if mended:
        ways = torch.lgamma(counts + spread) - torch.lgamma(spread) - torch.lgamma(counts + 1)
        log_density = ways + spread * torch.log1p(-success) + torch.xlogy(counts, success)
        return -log_density.mean()
    ways = gamma(counts + spread) / (gamma(spread) * gamma(counts + 1))
    density = ways * (1 - success) ** spread * success**counts
    return -torch.log(density + 1e-8).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    genes, kinds = int(torch.randint(60, 121, ())), int(torch.randint(3, 7, ()))
    cells, held_out = int(torch.randint(1500, 2500, ())), 300
    model = CellAutoencoder(genes, width=64, latent=int(torch.randint(4, 9, ())))
    profile = (1.7 * torch.randn(kinds, genes)).softmax(-1)
    kind = torch.randint(kinds, (cells + held_out,))
    size = torch.exp(4.6 + 0.35 * torch.randn(cells + held_out, 1))
    rate = size * profile[kind] * torch.distributions.Gamma(3.0, 3.0).sample((cells + held_out, genes))
    counts = torch.poisson(rate.clamp(max=15.0))
    rich = torch.randperm(cells)[: cells // 100]  # doublets and the like
    counts[rich] = torch.poisson(3 * rate[rich])
    return Program(
        model=model,
        rows=TensorDataset(counts[:cells]),
        loss=partial(loss, mended=mended),
        optimizer=lambda weights: torch.optim.RMSprop(weights, lr=2e-3),
        evaluation=[counts[cells:]],
        guilty=Guilty("overflow", ops=("exp", "lgamma")),
        batch_size=32,
        steps=300,
    )
