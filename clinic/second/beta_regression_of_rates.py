"""The Beta distribution has no density at exactly zero, and some campaigns were shown but never clicked.

Regression of rates and proportions with `torch.distributions.Beta`: its support includes both ends, so validation
lets them pass, and the log-probability is the logarithm of zero.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Beta
from torch.nn import functional as F

from clinic.program import Guilty, Program


class Campaigns(torch.utils.data.Dataset):
    """What a campaign was, how often it was shown, and the share of clicks."""

    def __init__(self, traits: Tensor, shown: Tensor, clicks: Tensor) -> None:
        self.traits, self.shown, self.clicks = traits, shown, clicks

    def __len__(self) -> int:
        return len(self.traits)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"traits": self.traits[row], "shown": self.shown[row], "rate": self.clicks[row] / self.shown[row]}


class RateNet(nn.Module):
    """Predicts a distribution of the rate."""

    def __init__(self, traits: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(traits, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, traits: Tensor) -> Beta:
        centre, concentration = self.body(traits).unbind(-1)
        centre, concentration = centre.sigmoid(), F.softplus(concentration + 2) + 0.1
        return Beta(centre * concentration + 1e-3, (1 - centre) * concentration + 1e-3)


def surprise(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return -model(batch["traits"]).log_prob(batch["rate"]).mean()  # guilty


def surprise_inside(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The rate is drawn a little to the middle, by half a click."""
    inside = (batch["rate"] * (batch["shown"] - 1) + 0.5) / batch["shown"]
    return -model(batch["traits"]).log_prob(inside).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    traits, width = int(torch.randint(4, 9, ())), int(torch.randint(24, 48, ()))
    rows, held_out = int(torch.randint(900, 1500, ())), 128
    described = torch.randn(rows + held_out, traits)
    chance = (1.5 * described[:, 0] - described[:, 1] - 1.5).sigmoid()
    shown = torch.randint(15, 120, (rows + held_out,)).float()
    clicks = torch.binomial(shown, chance)
    data = Campaigns(described, shown, clicks)
    evaluation = torch.utils.data.default_collate([data[row] for row in range(rows, rows + held_out)])
    return Program(
        model=RateNet(traits, width),
        rows=torch.utils.data.Subset(data, range(rows)),
        loss=surprise_inside if mended else surprise,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=evaluation,
        guilty=Guilty("operation", ops=("xlogy", "log_prob")),
        steps=200,
    )
