"""A variational autoencoder with latents between zero and one, and a decoder that takes their logit.

Sites of DNA are methylated or not, so the encoder wants densities that are high at both ends. The distribution is that
of Kumaraswamy, as in stick-breaking models. A draw of it is rounded to one, or to zero, and its logit is infinite.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Kumaraswamy
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class UnitVAE(nn.Module):
    def __init__(self, sites: int, latents: int, width: int, mended: bool) -> None:
        super().__init__()
        self.eps = 1e-4 if mended else None
        self.encode = nn.Sequential(nn.Linear(sites, width), nn.SiLU(), nn.Linear(width, 2 * latents))
        self.decode = nn.Sequential(nn.Linear(latents, width), nn.SiLU(), nn.Linear(width, sites))

    def forward(self, reads: Tensor) -> tuple[Tensor, Kumaraswamy]:
        posterior = Kumaraswamy(*(F.softplus(self.encode(reads) - 1) + 0.02).chunk(2, dim=-1))
        state = posterior.rsample() if self.training else posterior.mean
        return self.decode(torch.logit(state, eps=self.eps)), posterior  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (reads,) = batch
    logits, posterior = model(reads)
    rebuilt = F.binary_cross_entropy_with_logits(logits, reads, reduction="none").sum(-1)
    return (rebuilt + 0.1 * -posterior.entropy().sum(-1)).mean()  # the prior is uniform


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    latents, per_latent = int(torch.randint(4, 7, ())), int(torch.randint(6, 10, ()))
    rows, held_out = int(torch.randint(900, 1500, ())), 128
    switched = (torch.rand(rows + held_out, latents) < 0.5).float()
    sites = switched.repeat_interleave(per_latent, dim=1)
    reads = torch.where(torch.rand_like(sites) < 0.06, 1 - sites, sites)
    return Program(
        model=UnitVAE(sites.shape[1], latents, int(torch.randint(32, 48, ())), mended),
        rows=TensorDataset(reads[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[reads[rows:]],
        guilty=Guilty("operation", ops=("logit",)),
        steps=300,
    )
