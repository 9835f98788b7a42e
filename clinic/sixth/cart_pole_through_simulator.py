"""Balancing a pole on a cart: the simulator is written in torch, and the policy learns by the slope through 60 steps.

The upright pole is unstable, so that an error grows by some percent in each step of the simulator, and the slope of the
cost with it: norms of ten, a hundred, and now and then of thousands, which throw the policy to where the force is
always full. SGD never brings it back. Papers on policy gradients through simulators all say to clip; this one does not.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

STEP, GRAVITY = 0.04, 9.8


class Policy(nn.Module):
    """The force on the cart from place, speed, angle and turning."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, width)
        self.force = nn.Linear(width, 1)

    def forward(self, state: Tensor) -> Tensor:
        hidden = self.second(self.first(state).tanh()).tanh()
        return 10 * self.force(hidden).squeeze(-1).tanh()


def move(state: Tensor, force: Tensor, length: float) -> Tensor:
    """One step of Euler for a cart of one kilogram and a pole of 100 grams."""
    _, speed, angle, turning = state.unbind(-1)
    sine, cosine = angle.sin(), angle.cos()
    pushed = (force + 0.1 * length * turning.square() * sine) / 1.1
    spin = (GRAVITY * sine - cosine * pushed) / (length * (4 / 3 - 0.1 * cosine.square() / 1.1))
    faster = pushed - 0.1 * length * spin * cosine / 1.1
    change = torch.stack([speed, faster, turning, spin], -1)
    return state + STEP * change


def cost(model: nn.Module, batch: list[Tensor], *, horizon: int, length: float) -> Tensor:
    (state,) = batch
    total = state.new_zeros(())
    for _ in range(horizon):
        state = move(state, model(state), length)
        total = total + (1 - state[:, 2].cos()).mean() + 0.02 * state[:, 0].square().mean()
    return 10 * total / horizon


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    length, horizon = float(torch.empty(()).uniform_(0.4, 0.7)), int(torch.randint(55, 71, ()))
    spread = torch.tensor([0.5, 0.3, 0.25, 0.3])
    return Program(
        model=Policy(int(torch.randint(24, 41, ()))),
        rows=TensorDataset(spread * torch.randn(1000, 4)),
        loss=partial(cost, horizon=horizon, length=length),
        optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.9),
        evaluation=[spread * torch.randn(200, 4)],
        guilty=Guilty("explosion"),
        batch_size=32,
        steps=240,
        clip=1.0 if mended else None,
    )
