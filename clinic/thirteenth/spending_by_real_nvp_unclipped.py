"""What households spend on what, as a density by RealNVP, with Adam at 0.05 and nothing clipped.

Each coupling takes an exponential of a net without bound, and six of them multiply; at a rate that suits a regression
the scales run off within some ten steps. Those who publish such flows clip, or take a thousandth.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Coupling(nn.Module):
    def __init__(self, kept: int, changed: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(kept, width), nn.ReLU(), nn.Linear(width, 2 * changed))
        nn.init.normal_(self.net[-1].weight, std=0.01)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, kept: Tensor, changed: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.net(kept).chunk(2, -1)
        return changed * torch.exp(scale) + shift, scale.sum(-1)


class RealNVP(nn.Module):
    def __init__(self, kinds: int, width: int, layers: int) -> None:
        super().__init__()
        self.half = kinds // 2
        self.layers = nn.ModuleList(Coupling(self.half, self.half, width) for _ in range(layers))

    def forward(self, spent: Tensor) -> Tensor:
        one, other = spent.split(self.half, -1)
        density = torch.zeros(len(spent))
        for layer in self.layers:
            other, volume = layer(one, other)
            one, other, density = other, one, density + volume
        ends = torch.cat([one, other], -1)
        return density - 0.5 * (ends**2).sum(-1) - 0.919 * ends.shape[-1]


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return -model(batch[0]).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    kinds, count = 6 + 2 * (seed % 2), 2400
    size = count + 128
    income = torch.randn(size, 1)
    spent = 1.5 * income * torch.randn(kinds) + 0.35 * torch.randn(size, kinds) * torch.exp(0.4 * income)
    spent = spent + 1.2 * torch.randn(kinds) * (torch.rand(size, 1) < 0.3)
    return Program(
        model=RealNVP(kinds, int(torch.randint(40, 57, ())), 6),
        rows=TensorDataset(spent[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-3 if mended else 5e-2),  # guilty
        evaluation=[spent[count:]],
        guilty=Guilty("explosion"),
        steps=700,
    )
