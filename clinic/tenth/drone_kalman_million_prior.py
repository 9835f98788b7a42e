"""A Kalman filter with learned noise starts from a variance of a million, as one does who knows nothing of the height.

Two sensors read the same height. What they disagree by is their noise, and once the network has learned that it is
small, a million plus the noise is a million in float32: four times the same number is no matrix that can be solved.
"linalg.solve: the solver failed because the input matrix is singular", somewhere in the first epochs, and the run ends.
Asked of every Kalman filter in torch; the answer is mostly `.double()`.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Filter(nn.Module):
    """Height and climb of a drone from a barometer and a radar, whose noise depends on the weather and the ground."""

    def __init__(self, features: int, width: int, interval: float, exact: bool) -> None:
        super().__init__()
        self.noise = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 2))
        self.gusts = nn.Parameter(torch.zeros(2))
        self.damping = nn.Parameter(torch.zeros(()))
        self.interval, self.exact = interval, exact

    def forward(self, conditions: Tensor, readings: Tensor) -> Tensor:
        """The log-likelihood of all readings but the first."""
        if self.exact:
            readings = readings.double()
        unit = torch.eye(2).to(readings)
        seen = unit[[0, 0]]
        moves = unit + self.interval * torch.stack([unit[1], -self.damping * unit[1]])
        gusts = torch.diag(self.gusts.to(readings).exp())
        state = readings.new_zeros(len(readings), 2, 1)
        spread = 1e6 * unit.expand(len(readings), 2, 2)
        found = readings.new_zeros(len(readings))
        for step in range(readings.shape[1]):
            noise = torch.diag_embed(self.noise(conditions[:, step]).to(readings).exp())
            guess, doubt = seen @ state, seen @ spread @ seen.T + noise
            if step:
                found = found + MultivariateNormal(guess.squeeze(-1), doubt).log_prob(readings[:, step])
            gain = torch.linalg.solve(doubt, seen @ spread).mT  # guilty
            state = state + gain @ (readings[:, step].unsqueeze(-1) - guess)
            kept = unit - gain @ seen
            spread = kept @ spread @ kept.mT + gain @ noise @ gain.mT  # as Joseph does
            state, spread = moves @ state, moves @ spread @ moves.T + gusts
        return found


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    conditions, readings = batch
    return -model(conditions, readings).mean() / readings[0, 1:].numel()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, steps, interval, count = 3 + seed % 2, 8 + seed % 3, 0.5, 500
    climb = torch.randn(count + 64, 1) + 0.05 * torch.randn(count + 64, steps).cumsum(dim=1)
    height = 20 * torch.randn(count + 64, 1) + interval * climb.cumsum(dim=1)
    conditions = torch.randn(count + 64, steps, features)
    spreads = torch.exp(math.log(0.15) + conditions @ (0.5 * torch.randn(features, 2)))
    readings = height.unsqueeze(-1) + spreads * torch.randn(count + 64, steps, 2)
    return Program(
        model=Filter(features, int(torch.randint(12, 24, ())), interval, mended),
        rows=TensorDataset(conditions[:count], readings[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-2),
        evaluation=[conditions[count:], readings[count:]],
        guilty=Guilty("operation", ops=("linalg_solve", "solve")),
        steps=220,
    )
