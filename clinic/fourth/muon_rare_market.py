"""Volatility of shares with one output layer for each market, trained with a Muon that was written from the blog post.

Muon divides the momentum by its norm. A batch without a share of a small market gives its layer a gradient of
exactly 0, and at the beginning of training there is no momentum yet either: 0 / 0, and that layer is NaN for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Muon(Optimizer):
    """Momentum whose matrices are made orthogonal by Newton and Schulz; sign of the momentum for the rest."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, eps: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                buffer = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                buffer.mul_(group["momentum"]).add_(weight.grad)
                if weight.ndim == 2:
                    step = orthogonal(buffer, group["eps"]) * max(1, weight.shape[0] / weight.shape[1]) ** 0.5
                else:
                    step = 0.1 * buffer.sign()
                weight.sub_(step, alpha=group["lr"])


def orthogonal(matrix: Tensor, eps: float) -> Tensor:
    x: Tensor = matrix / (matrix.norm() + eps)  # guilty
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


class Markets(nn.Module):
    def __init__(self, days: int, width: int, markets: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(days, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.heads = nn.ModuleList(nn.Linear(width, 3) for _ in range(markets))

    def forward(self, returns: Tensor, market: Tensor) -> Tensor:
        states = self.body(returns.abs())
        each = torch.stack([head(states) for head in self.heads], dim=1)
        return each[torch.arange(len(market)), market]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    returns, market, volatility = batch
    return F.mse_loss(model(returns, market), volatility)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    days, markets = int(torch.randint(16, 25, ())), int(torch.randint(7, 10, ()))
    rows, held_out = int(torch.randint(900, 1300, ())), 128
    share = torch.ones(markets)
    share[-3:] = 0.05
    market = torch.multinomial(share, rows + held_out, replacement=True)
    level = (0.5 * torch.randn(rows + held_out, 1)).exp()
    returns = level * torch.randn(rows + held_out, days)
    # the next day, week and month, each market in its own way
    factor, offset = 0.5 + torch.rand(markets, 3), 0.5 * torch.randn(markets, 3)
    volatility = factor[market] * level.log() + offset[market] + 0.05 * torch.randn(rows + held_out, 3)
    return Program(
        model=Markets(days, 32, markets),
        rows=TensorDataset(returns[:rows], market[:rows], volatility[:rows]),
        loss=loss,
        optimizer=partial(Muon, lr=0.01, eps=1e-7 if mended else 0.0),
        evaluation=(returns[rows:], market[rows:], volatility[rows:]),
        guilty=Guilty("optimizer"),
        batch_size=32,
        steps=260,
    )
