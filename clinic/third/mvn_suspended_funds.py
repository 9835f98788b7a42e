"""A Gaussian of tomorrow's returns with the covariance of the last weeks, in some of which a fund was not traded.

`MultivariateNormal` looks whether its covariance is positive definite, by a Cholesky factorisation, and raises for the
whole batch. The window of a fund that was suspended is all zero, without the usual little on the diagonal.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Returns(nn.Module):
    """Signals tell the mean; how much each fund is to be trusted scales the covariance that was observed."""

    def __init__(self, signals: int, funds: int, jitter: float) -> None:
        super().__init__()
        self.jitter = jitter
        self.mean = nn.Sequential(nn.Linear(signals, 32), nn.Tanh(), nn.Linear(32, funds))
        self.trust = nn.Parameter(torch.zeros(funds))

    def forward(self, signals: Tensor, window: Tensor) -> MultivariateNormal:
        window = window * F.softplus(self.trust)
        observed = window.mT @ window / window.shape[1]
        covariance = observed + self.jitter * torch.eye(window.shape[2])
        return MultivariateNormal(self.mean(signals), covariance_matrix=covariance)  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    signals, window, tomorrow = batch
    return -model(signals, window).log_prob(tomorrow).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    traits, funds, days = int(torch.randint(4, 7, ())), int(torch.randint(4, 7, ())), 24
    rows, held_out = int(torch.randint(900, 1400, ())), 128
    signals = torch.randn(rows + held_out, traits)
    mixing = torch.eye(funds) + 0.4 * torch.randn(funds, funds)
    noise = torch.randn(rows + held_out, days + 1, funds) @ mixing
    window = noise[:, :days]
    tomorrow = 1.5 * signals @ torch.randn(traits, funds) + noise[:, days]
    for row in torch.randperm(rows)[: rows // 60].tolist():
        window[row, :, int(torch.randint(funds, ()))] = 0.0
    return Program(
        model=Returns(traits, funds, jitter=1e-2 if mended else 0.0),
        rows=TensorDataset(signals[:rows], window[:rows], tomorrow[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[signals[rows:], window[rows:], tomorrow[rows:]],
        guilty=Guilty("operation", ops=("linalg_cholesky", "linalg_cholesky_ex", "cholesky", "MultivariateNormal")),
        steps=240,
    )
