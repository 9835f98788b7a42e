"""RMSprop with momentum 0.99, taken over from a recipe for SGD, at the rate that was tuned without: a hundred times it.

A network learns the accelerations of a chain of masses on springs that get stiffer. RMSprop divides the slopes already,
and PyTorch adds up what comes out (`buf = momentum * buf + grad / avg`), so that each step is up to 100 rates long.
Nothing is infinite; the loss jumps about far above what it could be. Without momentum it learns.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


def accelerations(places: Tensor, speeds: Tensor, stiffness: Tensor) -> Tensor:
    """Both ends of the chain are fixed; springs harden with the cube of their stretch."""
    stretch = nn.functional.pad(places, (1, 1)).diff(dim=-1)
    force = stiffness * (stretch + 0.5 * stretch**3)
    return force.diff(dim=-1) - 0.1 * speeds


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    states, truth = batch
    return nn.functional.mse_loss(model(states), truth)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    masses, count = 4 + seed % 3, 1500
    places, speeds = 0.7 * torch.randn(count + 128, masses), torch.randn(count + 128, masses)
    truth = accelerations(places, speeds, 0.5 + torch.rand(masses + 1))
    states = torch.cat([places, speeds], dim=-1)
    width = int(torch.randint(128, 161, ()))
    model = nn.Sequential(
        nn.Linear(2 * masses, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, masses)
    )
    return Program(
        model=model,
        rows=TensorDataset(states[:count], truth[:count]),
        loss=loss,
        optimizer=partial(torch.optim.RMSprop, lr=3e-3, momentum=0.0 if mended else 0.99),  # guilty
        evaluation=[states[count:], truth[count:]],
        guilty=Guilty("explosion"),
        batch_size=64,
        steps=3200,
    )
