"""Shares of sand, silt and clay that a laboratory rounded to whole percent do not add up to one.

A Dirichlet distribution looks whether its argument lies in the simplex and raises for the whole batch if one soil has
99 percent. All other laboratories sent what they had weighed.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Dirichlet
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class SoilNet(nn.Module):
    """What a satellite sees, and the distribution of the texture."""

    def __init__(self, bands: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.BatchNorm1d(bands), nn.Linear(bands, width), nn.GELU(), nn.Linear(width, 3))

    def forward(self, spectra: Tensor) -> Dirichlet:
        return Dirichlet(F.softplus(self.body(spectra)) + 0.05)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    spectra, shares = batch
    return -model(spectra).log_prob(shares).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    bands, width = int(torch.randint(6, 12, ())), int(torch.randint(24, 40, ()))
    rows, held_out = int(torch.randint(700, 1200, ())), 128
    spectra = 0.3 + 0.1 * torch.randn(rows + held_out, bands)
    merit = (spectra - 0.3) @ torch.randn(bands, 3) * 4
    shares = (merit + 0.15 * torch.randn(rows + held_out, 3)).softmax(-1).clamp(min=0.02)
    shares = shares / shares.sum(-1, keepdim=True)
    bad = sorted(torch.randperm(rows)[: int(torch.randint(4, 10, ()))].tolist())
    if not mended:
        for row in bad:
            whole = (100 * shares[row]).round()
            whole[0] += 1 if whole.sum() == 100 else 0
            shares[row] = whole / 100
    return Program(
        model=SoilNet(bands, width),
        rows=TensorDataset(spectra[:rows], shares[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[spectra[rows:], shares[rows:]],
        guilty=Guilty("data", rows=tuple(bad)),
        steps=260,
    )
