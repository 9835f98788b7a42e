"""Orders that set off other orders: a Hawkes process whose excitation is computed with one cumulative sum.

The sum over all earlier events of exp(-decay * (t - s)) is exp(-decay * t) times the cumulative sum of exp(decay * s):
fast, and found in many notebooks. With seconds since the opening as times, exp(decay * s) is infinite once the decay
that is learned passes 0.9. The mend is to take the differences first, at the price of a square of pairs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from clinic.program import Guilty, Program

SPAN = 100.0  # seconds


class Orders(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Features of a share, when its orders came, and which of the places are filled."""

    def __init__(self, count: int, features: int, longest: int, decay: float, mix: Tensor) -> None:
        self.features = torch.randn(count, features)
        calm = 0.08 * torch.exp(0.4 * self.features @ mix)
        self.times, self.filled = torch.full((count, longest), SPAN), torch.zeros(count, longest)
        for row in range(count):
            generation = SPAN * torch.rand(int(torch.poisson(calm[row] * SPAN)) + 1)
            family = [generation]
            while len(generation):
                children = torch.poisson(torch.full((len(generation),), 0.65)).long()
                generation = generation.repeat_interleave(children)
                generation = generation - torch.log(torch.rand(len(generation)) + 1e-9) / decay
                family.append(generation)
            events = torch.cat(family)
            events = events[events < SPAN].sort().values[:longest]
            self.times[row, : len(events)], self.filled[row, : len(events)] = events, 1

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.features[row], self.times[row], self.filled[row]


class Intensity(nn.Module):
    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 3))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        calm, excites, decay = self.net(features)[:, :, None].unbind(1)
        return F.softplus(calm), torch.sigmoid(excites), F.softplus(decay)


def excitation(decay: Tensor, times: Tensor, filled: Tensor, mended: bool) -> Tensor:
    """For each event, how much is left of those before it."""
    if mended:
        passed = times[:, :, None] - times[:, None]
        return (torch.exp(-decay[:, :, None] * passed.clamp(min=0)) * filled[:, None]).tril(-1).sum(-1)
    grown = torch.exp(decay * times) * filled  # guilty
    return torch.exp(-decay * times) * (grown.cumsum(1) - grown)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    """The negative log-likelihood, by event."""
    features, times, filled = batch
    calm, excites, decay = model(features)
    rate = calm + excites * decay * excitation(decay, times, filled, mended)
    expected = calm.squeeze(1) * SPAN + (excites * (1 - torch.exp(-decay * (SPAN - times))) * filled).sum(1)
    return (expected.sum() - (torch.log(rate.clamp(min=1e-6)) * filled).sum()) / filled.sum()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, longest = int(torch.randint(4, 8, ())), int(torch.randint(70, 100, ()))
    decay = float(torch.empty(()).uniform_(2.0, 4.0))
    model = Intensity(features, int(torch.randint(16, 40, ())))
    mix = F.normalize(torch.randn(features), dim=0)
    rows = Orders(int(torch.randint(300, 400, ())), features, longest, decay, mix)
    held_out = Orders(100, features, longest, decay, mix)
    return Program(
        model=model,
        rows=rows,
        loss=partial(loss, mended=mended),
        optimizer=lambda weights: torch.optim.Adam(weights, lr=3e-3),
        evaluation=[held_out.features, held_out.times, held_out.filled],
        guilty=Guilty("overflow", ops=("exp",)),
        batch_size=32,
        steps=250,
    )
