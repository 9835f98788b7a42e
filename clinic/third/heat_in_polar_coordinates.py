"""A physics-informed net for the heat of a disc: the equation divides by the radius, and the grid begins in the middle.

The slope there is a rounding error away from zero at best, and over a radius of zero it is infinite. All derivatives
are taken by `torch.autograd.grad`, so that the loss is a derivative itself.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Temperature(nn.Module):
    """Of a radius and a strength of the source; it is zero at the rim."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, radius: Tensor, source: Tensor) -> Tensor:
        return (1 - radius.square()) * self.body(torch.stack([radius, source], dim=-1)).squeeze(-1)


def slope(of: Tensor, by: Tensor) -> Tensor:
    return torch.autograd.grad(of.sum(), by, create_graph=True)[0]


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    """The mean square of what is left of the equation."""
    radius, source = batch
    with torch.enable_grad():  # also for validation
        radius = radius.detach().requires_grad_()
        first = slope(model(radius, source), radius)
        second = slope(first, radius)
        if mended:  # in the middle the limit of the quotient is the second derivative
            middle = radius == 0
            curvature = torch.where(middle, second, first / torch.where(middle, 1.0, radius))
        else:
            curvature = first / radius  # guilty
        return (second + curvature + source * (1 + radius.square())).square().mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    sources, circles = int(torch.randint(24, 40, ())), int(torch.randint(24, 36, ()))
    radius = torch.linspace(0, 1, circles).repeat(sources)
    source = (1 + 3 * torch.rand(sources)).repeat_interleave(circles)
    unseen = 0.05 + 0.9 * torch.rand(128)
    return Program(
        model=Temperature(int(torch.randint(24, 40, ()))),
        rows=TensorDataset(radius, source),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[unseen, 1 + 3 * torch.rand(128)],
        guilty=Guilty("operation", ops=("div",)),
        steps=300,
    )
