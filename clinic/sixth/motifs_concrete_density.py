"""Which motifs a promoter holds: an autoencoder with relaxed categorical latents, and their divergence by sampling.

`RelaxedOneHotCategorical` at a temperature of 0.1. Now and then, and more as the encoder grows sure, a share of a
sample is rounded to zero, the density takes its logarithm, and infinity minus infinity is NaN. The check of arguments
was switched off, as forums advise where it complains about sums of 1.000001. The paper of the Concrete distribution
says to stay with logarithms; torch has that distribution inside of this one, and few people look for it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import RelaxedOneHotCategorical
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

LENGTH, MOTIFS, PLACES = 24, 8, 3
HEAT = torch.tensor(0.1)


class Motifs(nn.Module):
    """Convolutions over the letters give a choice of motif for each third of the promoter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(4, width, 8, stride=8),
            nn.ReLU(),
            nn.Conv1d(width, width, 1),
            nn.ReLU(),
            nn.Conv1d(width, MOTIFS, 1),
        )
        self.decoder = nn.Sequential(nn.Linear(MOTIFS, width), nn.ReLU(), nn.Linear(width, 4 * LENGTH // PLACES))

    def forward(self, letters: Tensor) -> Tensor:
        return self.encoder(F.one_hot(letters, 4).float().mT).mT


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    letters = batch[0]
    guess = RelaxedOneHotCategorical(HEAT, logits=model(letters), validate_args=False)
    prior = RelaxedOneHotCategorical(HEAT, logits=torch.zeros(MOTIFS), validate_args=False)
    if mended:
        logarithm = guess.base_dist.rsample()
        choice = logarithm.exp()
        divergence = guess.base_dist.log_prob(logarithm) - prior.base_dist.log_prob(logarithm)
    else:
        choice = guess.rsample()
        divergence = guess.log_prob(choice) - prior.log_prob(choice)  # guilty
    said = model.decoder(choice).view(len(letters), LENGTH, 4)
    return F.cross_entropy(said.mT, letters, reduction="none").sum(-1).mean() + 0.2 * divergence.sum(-1).mean()


def promoters(count: int, motifs: Tensor) -> Tensor:
    """A motif in each third, with a few letters changed."""
    letters = motifs[torch.randint(MOTIFS, (count, PLACES))].flatten(1)
    return torch.where(torch.rand(letters.shape) < 0.05, torch.randint(4, letters.shape), letters)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    motifs = torch.randint(4, (MOTIFS, LENGTH // PLACES))
    letters, held_out = promoters(int(torch.randint(2000, 3000, ())), motifs), promoters(500, motifs)
    return Program(
        model=Motifs(int(torch.randint(48, 81, ()))),
        rows=TensorDataset(letters),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[held_out],
        guilty=Guilty("operation", ops=("log", "log_prob", "sub", "logsumexp")),
        batch_size=32,
        steps=600,
    )
