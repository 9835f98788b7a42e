"""A value function is fitted to its own estimates of the next state, and runs away with them.

Temporal differences off policy, with features that grow in the course of an episode (stock, score, distance run) and
a log that only holds the first steps: each update raises the value of the next state by more than that of this one,
and what it raises is never held against what really happens. The values grow exponentially; no single step is wrong.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clinic.program import Guilty, Program

DISCOUNT = 0.98


class Transitions(torch.utils.data.Dataset):
    """Recorded transitions, each with the return that was obtained in the end."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["state"])

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: column[row] for name, column in self.columns.items()}


class Value(nn.Module):
    """A small network with a linear path."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1)
        self.body = nn.Sequential(nn.Linear(features, width), nn.Softplus(), nn.Linear(width, 1))

    def forward(self, state: Tensor) -> Tensor:
        return (self.linear(state) + self.body(state)).squeeze(-1)


def bootstrapped_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        target = batch["reward"] + DISCOUNT * model(batch["following"])
    return F.mse_loss(model(batch["state"]), target)


def return_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["state"]), batch["return"])


def episodes(count: int, length: int, features: int) -> dict[str, Tensor]:
    """Stocks that grow by a quarter in every step and pay a tenth. The log holds the first half of each episode."""
    stock = torch.rand(count, features) + 0.2
    path = [stock]
    for _ in range(length):
        path.append(path[-1] * (1.2 + 0.1 * torch.rand(count, features)))
    states = torch.stack(path, dim=1)
    rewards = 0.1 * states[:, :-1] @ torch.linspace(-1, 2, features)
    returns = torch.zeros(count, length + 1)
    for step in reversed(range(length)):
        returns[:, step] = rewards[:, step] + DISCOUNT * returns[:, step + 1]
    logged = length // 2
    return {
        "state": states[:, :logged].flatten(0, 1),
        "following": states[:, 1 : logged + 1].flatten(0, 1),
        "reward": rewards[:, :logged].flatten(),
        "return": returns[:, :logged].flatten(),
    }


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, length = int(torch.randint(4, 7, ())), int(torch.randint(8, 12, ()))
    runs, held_out = int(torch.randint(100, 160, ())), 24
    return Program(
        model=Value(features, int(torch.randint(16, 32, ()))),
        rows=Transitions(**episodes(runs, length, features)),
        loss=return_loss if mended else bootstrapped_loss,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        evaluation=episodes(held_out, length, features),
        guilty=Guilty("explosion"),
    )
