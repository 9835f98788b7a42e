"""A Gaussian policy clones a pilot with its log_std at -3.5 from the first step, the end of somebody else's annealing.

At that spread an error of one costs exp(7) / 2, and its slope is as large; under SGD at an ordinary rate, without
clipping, the first updates throw the weights away. Values of PPO's `log_std_init` are copied into cloning like that.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Pilot(nn.Module):
    """The mean of each control from what is seen, with a spread of its own."""

    def __init__(self, seen: int, controls: int, width: int, log_std: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(seen, width), nn.ELU(), nn.Linear(width, width), nn.ELU())
        self.mean = nn.Linear(width, controls)
        self.log_std = nn.Parameter(torch.full((controls,), log_std))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(self.body(state)), self.log_std


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    state, action = batch
    mean, log_std = model(state)
    surprise = 0.5 * ((action - mean) * torch.exp(-log_std)) ** 2 + log_std
    return surprise.sum(-1).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    seen, controls, count = 7 + seed % 4, 3, 2000
    size = count + 128
    state = torch.randn(size, seen)
    action = torch.tanh(state @ torch.randn(seen, controls)) + 0.3 * torch.randn(size, controls)
    return Program(
        model=Pilot(seen, controls, int(torch.randint(48, 65, ())), 0.0 if mended else -3.5),  # guilty
        rows=TensorDataset(state[:count], action[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.03, momentum=0.9),
        evaluation=[state[count:], action[count:]],
        guilty=Guilty("explosion"),
        steps=1500,
    )
