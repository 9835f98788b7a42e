"""A left-to-right hidden Markov model forbids transitions with -inf: `logsumexp` of nothing but -inf has slope NaN.

A batch in a fermenter goes through its stages in order and skips none. In the first readings the late stages cannot be
reached from anywhere, the value of `logsumexp` is the right one there (-inf), and the loss is finite. The slope is
exp(-inf - -inf). pytorch/pytorch#31829; asked as "NaN gradient after the first step, but the loss is fine".
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Stages(nn.Module):
    """What the sensors show in each stage depends on the recipe; how long a stage takes is learned."""

    def __init__(self, recipe: int, stages: int, sensors: int, width: int, never: float) -> None:
        super().__init__()
        self.means = nn.Sequential(
            nn.Linear(recipe, width), nn.Tanh(), nn.Linear(width, stages * sensors), nn.Unflatten(-1, (stages, sensors))
        )
        self.spreads = nn.Parameter(torch.zeros(stages, sensors))
        self.advance = nn.Parameter(torch.zeros(stages - 1))
        self.never = never

    def transitions(self) -> Tensor:
        on = nn.functional.logsigmoid(self.advance)
        stay = torch.cat([nn.functional.logsigmoid(-self.advance), on.new_zeros(1)])
        stages = torch.arange(len(stay))
        table = stay.new_full((len(stay), len(stay)), self.never)
        return table.index_put((stages, stages), stay).index_put((stages[:-1], stages[1:]), on)

    def forward(self, recipes: Tensor, readings: Tensor) -> Tensor:
        """The log-likelihood of each batch's readings."""
        seen = Normal(self.means(recipes).unsqueeze(1), self.spreads.exp()).log_prob(readings.unsqueeze(2)).sum(dim=-1)
        moves = self.transitions()
        reached = seen.new_full((len(seen), len(moves)), self.never)
        reached[:, 0] = 0.0
        reached = reached + seen[:, 0]
        for hour in range(1, readings.shape[1]):
            reached = torch.logsumexp(reached.unsqueeze(2) + moves, dim=1) + seen[:, hour]  # guilty
        return torch.logsumexp(reached, dim=1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    recipes, readings = batch
    return -model(recipes, readings).mean() / readings[0].numel()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    recipe, stages, sensors, hours, count = 3, 4 + seed % 3, 2 + seed % 2, 18, 700
    recipes = torch.randn(count + 96, recipe)
    levels = 1.5 * torch.randn(stages, sensors) + torch.einsum(
        "br,rsk->bsk", recipes, 0.7 * torch.randn(recipe, stages, sensors)
    )
    stage = (torch.rand(count + 96, hours) < 0.3).cumsum(dim=1).clamp(max=stages - 1)
    stage = stage - stage[:, :1]
    readings = levels.gather(1, stage.unsqueeze(-1).expand(-1, -1, sensors))
    readings = readings + 0.2 * torch.randn(readings.shape)
    return Program(
        model=Stages(recipe, stages, sensors, int(torch.randint(16, 32, ())), -1e4 if mended else -math.inf),
        rows=TensorDataset(recipes[:count], readings[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[recipes[count:], readings[count:]],
        guilty=Guilty("operation", ops=("logsumexp",)),
    )
