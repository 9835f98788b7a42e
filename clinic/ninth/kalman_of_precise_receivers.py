"""A Kalman filter subtracts what it has learned, P - K H P: beside a prior of 400 m, centimetres are rounded away.

"linalg.cholesky: the input is not positive-definite" after the first updates of a differentiable filter: as soon as the
network trusts a precise receiver, the difference is rounding error, zero or less. Joseph's form is the remedy, or
double precision: an old classic of filters, and new to those who learn them by gradient. Here ships find their way.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Filter(nn.Module):
    """Position and speed along a lane, from fixes whose noise a network reads off the receiver's own report."""

    move: Tensor
    seen: Tensor
    prior: Tensor

    def __init__(self, reports: int, width: int, joseph: bool) -> None:
        super().__init__()
        self.joseph = joseph
        self.noise = nn.Sequential(nn.Linear(reports, width), nn.Tanh(), nn.Linear(width, 1))
        self.unrest = nn.Parameter(torch.zeros(2))
        self.register_buffer("move", torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
        self.register_buffer("seen", torch.tensor([[1.0, 0.0]]))
        self.register_buffer("prior", torch.diag(torch.tensor([400.0**2, 10.0**2])))

    def forward(self, fixes: Tensor, reports: Tensor) -> MultivariateNormal:
        noise = self.noise(reports).exp()
        mean = fixes.new_zeros(len(fixes), 2, 1)
        covariance, unrest = self.prior.expand(len(fixes), 2, 2), self.unrest.exp().diag()
        means, covariances = [], []
        for step in range(fixes.shape[1]):
            mean = self.move @ mean
            covariance = self.move @ covariance @ self.move.T + unrest
            spread = self.seen @ covariance @ self.seen.T + noise[:, step, :, None]
            gain = covariance @ self.seen.T / spread
            mean = mean + gain * (fixes[:, step, None, None] - self.seen @ mean)
            if self.joseph:
                rest = torch.eye(2) - gain @ self.seen
                covariance = rest @ covariance @ rest.mT + noise[:, step, :, None] * gain @ gain.mT
            else:
                covariance = covariance - gain @ self.seen @ covariance  # guilty
            means.append(mean.squeeze(-1))
            covariances.append(covariance)
        factors = torch.linalg.cholesky(torch.stack(covariances, dim=1))
        return MultivariateNormal(torch.stack(means, dim=1), scale_tril=factors)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    fixes, reports, truth = batch
    return -model(fixes, reports).log_prob(truth).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    steps, reports, count = 5 + seed % 3, 3 + seed % 2, 800
    start = torch.cat([400 * torch.randn(count + 96, 1), 10 * torch.randn(count + 96, 1)], dim=1)
    speed = start[:, 1:] + 0.2 * torch.randn(count + 96, steps).cumsum(dim=1)
    position = start[:, :1] + speed.cumsum(dim=1)
    told = torch.randn(count + 96, steps, reports)
    deviation = (-2.0 + 2.0 * told[..., 0].tanh() + 0.3 * told[..., 1]).exp()  # of the fix, in metres
    fixes = position + deviation * torch.randn(count + 96, steps)
    truth = torch.stack([position, speed], dim=-1)
    return Program(
        model=Filter(reports, int(torch.randint(12, 20, ())), joseph=mended),
        rows=TensorDataset(fixes[:count], told[:count], truth[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1.5e-2),
        evaluation=[fixes[count:], told[count:], truth[count:]],
        guilty=Guilty("operation", ops=("sub", "subtract", "linalg_cholesky")),
        steps=240,
    )
