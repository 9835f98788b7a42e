"""The ratio of the new to the old policy in PPO, where some actions were drawn at random and not from the old policy.

Exploration by an epsilon: the logarithm of the probability that was recorded is that of the Gaussian, -200 for a random
action. The ratio is exp(200), and the clip beside it does not keep infinity out of the slope.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class ActorCritic(nn.Module):
    def __init__(self, observed: int, width: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(observed, width), nn.Tanh(), nn.Linear(width, 1))
        self.critic = nn.Sequential(nn.Linear(observed, width), nn.Tanh(), nn.Linear(width, 1))
        self.log_std = nn.Parameter(torch.full((), -0.5))

    def forward(self, observed: Tensor) -> tuple[Normal, Tensor]:
        return Normal(self.actor(observed).squeeze(-1), self.log_std.exp()), self.critic(observed).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor], most: float) -> Tensor:
    observed, action, old_log_prob, advantage, returns = batch
    policy, value = model(observed)
    difference = policy.log_prob(action) - old_log_prob
    ratio = torch.exp(difference.clamp(max=most))  # guilty
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return F.mse_loss(value, returns) - surrogate.mean() - 0.001 * policy.entropy().mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    sensors, width = int(torch.randint(4, 8, ())), int(torch.randint(32, 56, ()))
    rows, held_out = int(torch.randint(1500, 2200, ())), 256
    observed = torch.randn(rows + held_out, sensors)
    mean, std = 0.3 * observed[:, 0], 0.05
    action = mean + std * torch.randn(rows + held_out)
    random = torch.randperm(rows)[: rows // 20]
    action[random] = 2 * torch.rand(len(random)) - 1
    old_log_prob = -0.5 * ((action - mean) / std).square() - math.log(std * math.sqrt(2 * math.pi))
    returns = 2 * observed[:, 1] - observed[:, 2].abs() - (action - mean - 0.03).abs()
    advantage = 10 * (action - mean)
    advantage[random] = torch.randn(len(random))
    columns = [observed, action, old_log_prob, advantage, returns]
    return Program(
        model=ActorCritic(sensors, width),
        rows=TensorDataset(*(column[:rows] for column in columns)),
        loss=partial(loss, most=1.0 if mended else math.inf),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[column[rows:] for column in columns],
        guilty=Guilty("overflow", ops=("exp",)),
        batch_size=64,
        steps=240,
        clip=0.5,
    )
