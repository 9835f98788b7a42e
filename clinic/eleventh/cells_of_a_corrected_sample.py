"""A negative binomial autoencoder of single cells, into which a few cells come whose counts were corrected before.

Programs that take the ambient background away leave fractions, and a negative binomial has whole numbers only:
"ValueError: Expected value argument (Tensor of shape (64, 40)) to be within the support
(IntegerGreaterThan(lower_bound=0))". Met by users of scVI-like models who put samples of two sources together.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import NegativeBinomial
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class CountAutoencoder(nn.Module):
    def __init__(self, genes: int, width: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(genes, width), nn.ReLU(), nn.Linear(width, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, genes))
        self.log_dispersion = nn.Parameter(torch.zeros(genes))

    def forward(self, counts: Tensor) -> NegativeBinomial:
        shares = self.decoder(self.encoder(torch.log1p(counts))).log_softmax(-1)
        log_mean = shares + counts.sum(-1, keepdim=True).log()
        return NegativeBinomial(self.log_dispersion.exp(), logits=log_mean - self.log_dispersion)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (counts,) = batch
    return -model(counts).log_prob(counts).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    genes, kinds = int(torch.randint(30, 50, ())), int(torch.randint(4, 7, ()))
    cells, held_out = int(torch.randint(900, 1300, ())), 256
    profile = (1.8 * torch.randn(kinds, genes)).softmax(-1)
    depth = torch.exp(6.5 + 0.4 * torch.randn(cells + held_out, 1))
    mean = depth * profile[torch.randint(kinds, (cells + held_out,))]
    counts = torch.poisson(mean * torch.distributions.Gamma(4.0, 4.0).sample(mean.shape)) + 0.0
    counts[:, 0] += 1  # no cell is empty
    corrected = torch.randperm(cells)[: 4 + seed % 4].sort().values
    background = 0.03 * counts[corrected].sum(-1, keepdim=True) * counts[:cells].mean(0) / counts[:cells].sum(-1).mean()
    counts[corrected] = (counts[corrected] - background).clamp(min=0.0)
    if mended:
        counts[corrected] = counts[corrected].round()
    return Program(
        model=CountAutoencoder(genes, int(torch.randint(32, 64, ())), 4),
        rows=TensorDataset(counts[:cells]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[counts[cells:]],
        guilty=Guilty("data", rows=tuple(corrected.tolist())),
        batch_size=64,
    )
