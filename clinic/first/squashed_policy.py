"""Cloning an expert whose actions were clipped to [-1, 1] with a tanh-squashed Gaussian: `atanh(1)` is infinite.

rlworkgroup/garage#2129, "actions taken by an expert, then clipped into the action space"; rail-berkeley/hil-serl#6.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Policy(nn.Module):
    def __init__(self, observed: int, width: int, actions: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.body = nn.Sequential(nn.Linear(observed, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.mean = nn.Linear(width, actions)
        self.log_spread = nn.Parameter(torch.zeros(actions))

    def log_prob(self, observations: Tensor, actions: Tensor) -> Tensor:
        before = Normal(self.mean(self.body(observations)), self.log_spread.exp())
        if self.mended:
            actions = actions.clamp(-0.999, 0.999)
        raw = torch.atanh(actions)  # guilty
        return (before.log_prob(raw) - torch.log(1 - actions**2 + 1e-6)).sum(dim=-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    observations, actions = batch
    return -model.log_prob(observations, actions).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    observed, actions, count = 6 + seed % 4, 2, 1000
    observations = torch.randn(count + 96, observed)
    demanded = 0.5 * observations @ torch.randn(observed, actions) / observed**0.5
    demanded = demanded + 0.03 * torch.randn(count + 96, actions)
    demanded[count:] = demanded[count:].clamp(-0.95, 0.95)
    full = torch.randperm(count)[: 15 + 5 * (seed % 4)]
    demanded[full] *= 10  # the expert reaches for the stop now and then
    taken = demanded.clamp(-1, 1)
    return Program(
        model=Policy(observed, int(torch.randint(24, 40, ())), actions, mended),
        rows=TensorDataset(observations[:count], taken[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[observations[count:], taken[count:]],
        guilty=Guilty("operation", ops=("atanh", "arctanh")),
    )
