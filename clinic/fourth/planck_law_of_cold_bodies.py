"""The temperature of distant asteroids from infrared spectra: a network guesses it, Planck's law makes a spectrum.

At the short end of the spectrum the exponent is beyond 88 for a guess below some 100 kelvin. `exp` is then infinite,
and one over it is a perfect 0, so the loss looks fine; but its gradient is infinite over infinite.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

SECOND = 14387.77  # the second radiation constant, in micrometres times kelvin


class Thermometer(nn.Module):
    def __init__(self, bands: Tensor, hidden: int) -> None:
        super().__init__()
        self.bands: Tensor
        self.register_buffer("bands", bands)
        self.net = nn.Sequential(
            nn.Linear(len(bands), hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def radiance(self, exponent: Tensor) -> Tensor:
        return 1 / (torch.exp(exponent) - 1)  # guilty

    def forward(self, spectra: Tensor) -> Tensor:
        temperature = 120 + 40 * self.net(spectra)
        exponent = SECOND / (self.bands * temperature)
        spectrum: Tensor = 300 * (20 / self.bands) ** 5 * self.radiance(exponent)
        return spectrum


class MendedThermometer(Thermometer):
    def radiance(self, exponent: Tensor) -> Tensor:
        small = torch.exp(-exponent)
        return small / (1 - small)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    measured, spectra = batch
    return F.mse_loss(model(measured), spectra)


def spectrum(bands: Tensor, temperature: Tensor) -> Tensor:
    exponent = SECOND / (bands * temperature)
    radiance: Tensor = 1 / torch.special.expm1(exponent.double())
    return 300 * (20 / bands) ** 5 * radiance.float()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, hidden = int(torch.randint(600, 900, ())), 64, int(torch.randint(24, 41, ()))
    shortest = float(1.7 + 0.3 * torch.rand(()))
    bands = torch.logspace(torch.tensor(shortest).log10().item(), 2, 20)
    temperature = 45 + 105 * torch.rand(rows + held_out, 1)
    spectra = spectrum(bands, temperature)
    measured = spectra * (1 + 0.03 * torch.randn_like(spectra)) + 0.02 * torch.randn_like(spectra)
    return Program(
        model=(MendedThermometer if mended else Thermometer)(bands, hidden),
        rows=TensorDataset(measured[:rows], spectra[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=(measured[rows:], spectra[rows:]),
        guilty=Guilty("overflow", ops=("exp",)),
        batch_size=32,
        steps=300,
    )
