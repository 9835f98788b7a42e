"""An autoencoder of gene counts of single cells, with the negative binomial written out as in the textbook.

The factorial and the gamma functions are `lgamma(...).exp()`. Beyond a count of 34 they are infinite in 32 bits, and
infinite over infinite is NaN. Nearly all cells count less than that of every gene; some marker genes do not.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from program import Guilty, Program
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def gamma(x: Tensor) -> Tensor:
    return torch.lgamma(x).exp()  # guilty


def negative_binomial(counts: Tensor, mean: Tensor, shape: Tensor) -> Tensor:
    """The negative logarithm of the probability of counts."""
    ways = gamma(counts + shape) / (gamma(shape) * gamma(counts + 1))
    rest = shape * torch.log(shape / (shape + mean)) + counts * torch.log(mean / (shape + mean))
    return -(torch.log(ways) + rest)


def mended_negative_binomial(counts: Tensor, mean: Tensor, shape: Tensor) -> Tensor:
    ways = torch.lgamma(counts + shape) - torch.lgamma(shape) - torch.lgamma(counts + 1)
    rest = shape * torch.log(shape / (shape + mean)) + counts * torch.log(mean / (shape + mean))
    return -(ways + rest)


class CellAutoencoder(nn.Module):
    def __init__(self, genes: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(genes, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 48), nn.ReLU(), nn.Linear(48, genes))
        self.log_shape = nn.Parameter(torch.zeros(genes))

    def forward(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        shares = F.softmax(self.decoder(self.encoder(torch.log1p(counts))), dim=-1)
        return counts.sum(-1, keepdim=True) * shares + 1e-4, self.log_shape.exp()


def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    (counts,) = batch
    return negative_binomial(counts, *model(counts)).mean()


def mended_loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    (counts,) = batch
    return mended_negative_binomial(counts, *model(counts)).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    genes, kinds = int(torch.randint(40, 61, ())), int(torch.randint(4, 7, ()))
    rows, held_out = int(torch.randint(800, 1200, ())), 64
    profiles = F.softmax(2.2 * torch.randn(kinds, genes), dim=-1).clamp(max=0.12)
    kind = torch.randint(kinds, (rows + held_out,))
    depth = 60 * (0.4 * torch.randn(rows + held_out, 1)).exp()
    rates = depth * profiles[kind]
    # some cells of the first kind are full of the two genes that mark it
    cells = torch.randperm(rows)[: int(torch.randint(2, 6, ()))]
    rates[cells, :2] = 45 + 20 * torch.rand(len(cells), 2)
    counts = torch.poisson(rates)
    return Program(
        model=CellAutoencoder(genes, latent=8),
        rows=TensorDataset(counts[:rows]),
        loss=mended_loss if mended else loss,
        optimizer=partial(torch.optim.AdamW, lr=5e-3, weight_decay=1e-4),
        evaluation=(counts[rows:],),
        guilty=Guilty("overflow", ops=("exp", "lgamma")),
        batch_size=32,
        steps=300,
    )
