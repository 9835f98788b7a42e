"""A Wasserstein critic with a gradient penalty, the norm by hand: where no unit is active, the slope is exactly zero.

Does a fast simulation of a detector agree with the full one? The penalty is the root of a sum of squares of slopes, and
has itself to be derived; at zero it has no derivative.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Critic(nn.Module):
    """A small net of ReLUs, as it has to be evaluated within the detector."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 1)

    def forward(self, events: Tensor) -> Tensor:
        return self.head(self.body(events)).squeeze(-1)


def penalty(model: nn.Module, between: Tensor, eps: float) -> Tensor:
    with torch.enable_grad():  # also for validation
        between = between.detach().requires_grad_()
        (slopes,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        norm = torch.sqrt(slopes.square().sum(-1) + eps)  # guilty
        return (norm - 1).square().mean()


def loss(model: nn.Module, batch: list[Tensor], eps: float) -> Tensor:
    full, fast, share = batch
    between = share * full + (1 - share) * fast
    return model(fast).mean() - model(full).mean() + 5 * penalty(model, between, eps)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, width = int(torch.randint(5, 9, ())), 5
    rows, held_out = int(torch.randint(1500, 2500, ())), 256
    full = torch.randn(rows + held_out, features) + 0.8
    fast = 0.8 * torch.randn(rows + held_out, features)
    fast[:, 0] -= 0.8
    share = torch.rand(rows + held_out, 1)
    return Program(
        model=Critic(features, width),
        rows=TensorDataset(full[:rows], fast[:rows], share[:rows]),
        loss=partial(loss, eps=1e-6 if mended else 0.0),
        optimizer=partial(torch.optim.Adam, lr=3e-3, betas=(0.5, 0.9)),
        evaluation=[full[rows:], fast[rows:], share[rows:]],
        guilty=Guilty("operation", ops=("sqrt",)),
        batch_size=64,
        steps=260,
    )
