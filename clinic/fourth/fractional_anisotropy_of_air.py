"""Diffusion MRI with few directions: a network gives the three diffusivities of a voxel, and of them the anisotropy.

What is not brain is multiplied by a mask of 0, and a few voxels of air are among the samples. There all diffusivities
are 0, and the fractional anisotropy is the root of 0 / 0; so is the gradient, whatever the loss does with them.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Diffusivities(nn.Module):
    def __init__(self, directions: int, width: int, floor: float) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(directions, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
        )
        self.floor = floor

    def forward(self, signals: Tensor, brain: Tensor) -> tuple[Tensor, Tensor]:
        """Mean diffusivity and fractional anisotropy of voxels."""
        three = F.softplus(self.net(signals)) * brain.unsqueeze(-1)
        mean = three.mean(-1)
        apart = (three - mean.unsqueeze(-1)).square().sum(-1)
        return mean, torch.sqrt(1.5 * (apart + self.floor**2) / (three.square().sum(-1) + self.floor))  # guilty


def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    signals, brain, mean, anisotropy = batch
    mean_guess, anisotropy_guess = model(signals, brain)
    return F.l1_loss(mean_guess, mean) + F.l1_loss(anisotropy_guess, anisotropy)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    directions, rows, held_out = int(torch.randint(9, 16, ())), int(torch.randint(1500, 2500, ())), 256
    towards = F.normalize(torch.randn(directions, 3), dim=-1)
    # fibres along the body or across it, and grey matter, in square micrometres per millisecond
    own = torch.tensor([[1.7, 0.4, 0.3], [0.4, 1.6, 0.3], [0.9, 0.8, 0.7]])
    brain = torch.ones(rows + held_out)
    brain[torch.randperm(rows)[: int(torch.randint(2, 6, ()))]] = 0
    three = own[torch.randint(3, brain.shape)] * (1 + 0.1 * torch.randn(rows + held_out, 3)) * brain.unsqueeze(-1)
    mean = three.mean(-1)
    apart, size = (three - mean.unsqueeze(-1)).square().sum(-1), three.square().sum(-1)
    anisotropy = torch.sqrt(1.5 * apart / size.clamp(min=1e-6))
    signals = torch.exp(-three @ towards.square().T)
    signals = signals * brain.unsqueeze(-1) + 0.02 * torch.randn_like(signals)
    return Program(
        model=Diffusivities(directions, int(torch.randint(32, 49, ())), 1e-4 if mended else 0.0),
        rows=TensorDataset(signals[:rows], brain[:rows], mean[:rows], anisotropy[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.RMSprop, lr=1e-3),
        evaluation=(signals[rows:], brain[rows:], mean[rows:], anisotropy[rows:]),
        guilty=Guilty("operation", ops=("sqrt", "div", "truediv", "true_divide")),
        batch_size=64,
        steps=300,
    )
