"""The likelihood of a flow needs the logarithm of a determinant, and the determinant itself leaves the range of floats.

A linear flow from spectra to white noise: the spectra have small deviations in some dozens of bands, so the map that
makes them white has a determinant of 10 to the power of 50. Training is fine until it exceeds 3e38.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class LinearFlow(nn.Module):
    """Shifts, mixes and scales the bands."""

    def __init__(self, bands: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.shift = nn.Parameter(torch.zeros(bands))
        self.mixing = nn.Parameter(torch.eye(bands) + 0.01 * torch.randn(bands, bands))
        self.log_scale = nn.Parameter(torch.zeros(bands))

    def forward(self, spectra: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.log_scale.exp().unsqueeze(-1) * self.mixing
        white = (spectra - self.shift) @ weight.mT
        if self.mended:
            return white, torch.linalg.slogdet(weight).logabsdet
        return white, torch.linalg.det(weight).abs().log()  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (spectra,) = batch
    white, log_determinant = model(spectra)
    log_density = -0.5 * (white.square() + math.log(2 * math.pi)).sum(-1) + log_determinant
    return -log_density.mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    bands, rows, held_out = int(torch.randint(28, 40, ())), int(torch.randint(600, 1200, ())), 128
    spread = 0.01 + 0.01 * torch.rand(bands)
    mixing = torch.eye(bands) + 0.3 * torch.randn(bands, bands) / math.sqrt(bands)
    spectra = (torch.randn(rows + held_out, bands) * spread) @ mixing + 0.05 * torch.rand(bands)
    return Program(
        model=LinearFlow(bands, mended),
        rows=TensorDataset(spectra[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=0.02),
        evaluation=[spectra[rows:]],
        guilty=Guilty("overflow", ops=("linalg_det", "det")),
        batch_size=64,
        steps=260,
    )
