"""A mixture density network that adds up densities before it takes the log: far from all means they round to zero.

keras-team/keras#2586, "Mixture Density Network quickly gets to nan loss"; nnsvs/nnsvs#39.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class MixtureDensity(nn.Module):
    def __init__(self, features: int, width: int, parts: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.Tanh())
        self.share = nn.Linear(width, parts)
        self.mean = nn.Linear(width, parts)
        self.log_spread = nn.Linear(width, parts)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(inputs)
        return self.share(hidden), self.mean(hidden), self.log_spread(hidden)


def likelihood(share: Tensor, mean: Tensor, log_spread: Tensor, target: Tensor) -> Tensor:
    spread = log_spread.exp()
    density = torch.exp(-0.5 * ((target - mean) / spread) ** 2) / (spread * math.sqrt(2 * math.pi))
    return torch.log((share.softmax(dim=-1) * density).sum(dim=-1))  # guilty


def careful_likelihood(share: Tensor, mean: Tensor, log_spread: Tensor, target: Tensor) -> Tensor:
    log_density = -0.5 * ((target - mean) / log_spread.exp()) ** 2 - log_spread - 0.5 * math.log(2 * math.pi)
    return torch.logsumexp(share.log_softmax(dim=-1) + log_density, dim=-1)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    inputs, targets = batch
    measure = careful_likelihood if mended else likelihood
    return -measure(*model(inputs), targets.unsqueeze(-1)).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 3 + seed % 3, 900
    inputs = torch.randn(count + 96, features)
    side = torch.randint(2, (count + 96,)) * 2 - 1
    targets = 12 * side + 4 * inputs[:, 0] + 0.5 * torch.randn(count + 96)
    return Program(
        model=MixtureDensity(features, int(torch.randint(24, 40, ())), 3 + seed % 3),
        rows=TensorDataset(inputs[:count], targets[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[inputs[count:], targets[count:]],
        guilty=Guilty("operation", ops=("log",)),
    )
