"""LARS written from its formula: the norm of the weights over that of the slope, which for a head without work is zero.

One trunk for several tasks. A batch that has no row of a rare task gives the head of this task a slope of exactly zero,
and the step of it is zero times infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class LARS(torch.optim.Optimizer):
    """Each tensor moves by a share of its own norm."""

    def __init__(self, weights: Any, lr: float, momentum: float, eps: float) -> None:
        super().__init__(weights, {"lr": lr, "momentum": momentum, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                trust = weight.norm() / (weight.grad.norm() + group["eps"])
                buffer = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                buffer.mul_(group["momentum"]).add_(group["lr"] * trust * weight.grad)
                weight.sub_(buffer)


class ManyTasks(nn.Module):
    def __init__(self, features: int, tasks: int, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(tasks))

    def forward(self, features: Tensor, task: Tensor) -> Tensor:
        answers = torch.cat([head(self.trunk(features)) for head in self.heads], dim=-1)
        return answers.gather(1, task.unsqueeze(-1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    features, task, target = batch
    return nn.functional.mse_loss(model(features, task), target)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, tasks = int(torch.randint(6, 11, ())), int(torch.randint(3, 6, ()))
    rows, held_out = int(torch.randint(900, 1500, ())), 256
    described = torch.randn(rows + held_out, features)
    chances = torch.ones(tasks)
    chances[-1] = 0.12
    task = torch.multinomial(chances, rows + held_out, replacement=True)
    merit = torch.relu(described @ torch.randn(features, tasks)) + 0.5
    target = merit.gather(1, task.unsqueeze(-1)).squeeze(-1) + 0.1 * torch.randn(rows + held_out)
    return Program(
        model=ManyTasks(features, tasks, int(torch.randint(32, 56, ()))),
        rows=TensorDataset(described[:rows], task[:rows], target[:rows]),
        loss=loss,
        optimizer=partial(LARS, lr=0.01, momentum=0.8, eps=1e-8 if mended else 0.0),
        evaluation=[described[rows:], task[rows:], target[rows:]],
        guilty=Guilty("optimizer"),
        steps=260,
    )
