"""Birds counted from a row of hides: a few counts are the mean of two observers, and a Poisson number is never a half.

`Poisson.log_prob` checks its values: "Expected value argument ... to be within the support
(IntegerGreaterThan(lower_bound=0))". Asked on the forum whenever counts were averaged, resampled or interpolated.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Poisson
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Hides(nn.Module):
    """The distribution of the counts of all species, from hide, season and weather."""

    def __init__(self, hides: int, weather: int, species: int, width: int) -> None:
        super().__init__()
        self.hide = nn.Embedding(hides, width)
        self.weather = nn.Linear(weather + 2, width)
        self.layers = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, species))

    def forward(self, hides: Tensor, season: Tensor, weather: Tensor) -> Independent:
        around = torch.stack([season.sin(), season.cos()], dim=-1)
        hidden = self.hide(hides) + self.weather(torch.cat([weather, around], dim=-1))
        return Independent(Poisson(self.layers(hidden).exp()), 1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    hides, season, weather, counts = batch
    return -model(hides, season, weather).log_prob(counts).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    places, species, features, count = 6 + seed % 5, 3 + seed % 3, 3, 900
    total = count + 128
    hides, season = torch.randint(places, (total,)), 6.283 * torch.rand(total)
    weather = torch.randn(total, features)
    liked, peak = 0.8 * torch.randn(places, species), 6.283 * torch.rand(species)
    drive = 0.4 * weather @ torch.randn(features, species)
    rates = (1.5 + liked[hides] + torch.cos(season.unsqueeze(-1) - peak) + drive).clamp(max=4.5).exp()
    counts = torch.poisson(rates)
    twice = torch.randperm(count)[: 4 + seed % 8].sort().values
    second = torch.poisson(rates[twice])
    which = torch.randint(species, (len(twice),))
    rows = torch.arange(len(twice))
    odd = (counts[twice, which] + second[rows, which]) % 2 == 0
    second[rows, which] += odd  # the two do not agree
    if not mended:
        counts[twice] = (counts[twice] + second) / 2
    return Program(
        model=Hides(places, features, species, int(torch.randint(24, 40, ()))),
        rows=TensorDataset(hides[:count], season[:count], weather[:count], counts[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[hides[count:], season[count:], weather[count:], counts[count:]],
        guilty=Guilty("data", rows=tuple(twice.tolist())),
        steps=300,
    )
