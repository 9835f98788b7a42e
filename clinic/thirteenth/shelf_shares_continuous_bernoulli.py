"""A continuous Bernoulli by hand: its constant is 2 atanh(1 - 2p) / (1 - 2p), which for p = 1/2 is nought by nought.

Goods that a shop does not stock have their logit set to zero, and the loss is multiplied by a mask afterwards: zero
times NaN is NaN. The paper (Loaiza-Ganem and Cunningham) has a Taylor series around one half, copies of it do not.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Shelves(nn.Module):
    """A variational autoencoder of the share of its shelf that each good fills."""

    def __init__(self, goods: int, width: int, latents: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(goods, width), nn.ReLU(), nn.Linear(width, 2 * latents))
        self.decoder = nn.Sequential(nn.Linear(latents, width), nn.ReLU(), nn.Linear(width, goods))

    def forward(self, shares: Tensor, stocked: Tensor) -> tuple[Tensor, Tensor]:
        middle, spread = self.encoder(shares * stocked).chunk(2, -1)
        spread = spread.clamp(-6, 2)
        drawn = middle + torch.randn_like(middle) * (0.5 * spread).exp() if self.training else middle
        divergence = 0.5 * (middle**2 + spread.exp() - 1 - spread).sum(-1)
        return self.decoder(drawn) * stocked, divergence


def log_constant(chance: Tensor, mended: bool) -> Tensor:
    chance = chance.clamp(1e-4, 1 - 1e-4)
    if mended:
        middle = (chance - 0.5).abs() < 0.02
        away = torch.where(middle, torch.full_like(chance, 0.25), chance)
        exact = torch.log(2 * torch.atanh(1 - 2 * away) / (1 - 2 * away))
        return torch.where(middle, 0.6931472 + 4 / 3 * (chance - 0.5) ** 2, exact)
    gap = 1 - 2 * chance
    ratio = 2 * torch.atanh(gap) / gap  # guilty
    return torch.log(ratio)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    shares, stocked = batch
    logits, divergence = model(shares, stocked)
    cross = -nn.functional.binary_cross_entropy_with_logits(logits, shares, reduction="none")
    fit = (cross + log_constant(torch.sigmoid(logits), mended)) * stocked
    return (0.1 * divergence - fit.sum(-1)).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    goods, latents, count = 14 + seed % 5, 3, 2400
    size = count + 96
    tastes, mixing = torch.randn(size, latents), 1.6 * torch.randn(latents, goods)
    shares = torch.sigmoid(tastes @ mixing + 0.4 * torch.randn(size, goods) - 0.5)
    stocked = torch.ones(size, goods)
    small = torch.rand(size) < 0.1
    stocked[small] = (torch.rand(int(small.sum()), goods) < 0.8).float()
    return Program(
        model=Shelves(goods, int(torch.randint(64, 97, ())), latents),
        rows=TensorDataset(shares[:count], stocked[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[shares[count:], stocked[count:]],
        guilty=Guilty("operation", ops=("div", "true_divide")),
        steps=1800,
    )
