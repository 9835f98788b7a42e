"""How heat spreads in the ground: a network that emulates a solver, trained on runs of that solver.

The solver takes explicit steps of a fixed length, which are stable up to a conductivity of a quarter. A few runs of
the sweep were above: their fields swing from cell to cell and grow a thousand times and more, and nobody looked at
them all. In public sets of simulations such runs are found every now and then. Mended, those few were run with
shorter steps.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

SIZE, STEPS = 16, 40


class Emulator(nn.Module):
    """Dilated convolutions that add to the field they are given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, width, 3, padding=1, padding_mode="circular")
        self.layers = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=2**depth, dilation=2**depth, padding_mode="circular")
            for depth in range(3)
        )
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, field: Tensor, conductivity: Tensor) -> Tensor:
        state = self.first(torch.stack([field, conductivity[:, None, None].expand_as(field)], 1))
        for layer in self.layers:
            state = state + F.gelu(layer(state))
        return field + self.last(state).squeeze(1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    before, conductivity, after = batch
    return F.mse_loss(model(before, conductivity), after)


def solve(field: Tensor, conductivity: Tensor, steps: int, length: float = 1.0) -> Tensor:
    """Explicit Euler on a ring of rings, without a look at how long the steps may be."""
    share = length * conductivity[:, None, None]
    for _ in range(steps):
        around = sum(field.roll(move, side) for move in (1, -1) for side in (1, 2))
        field = field + share * (around - 4 * field)
    return field


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, held_out = int(torch.randint(500, 700, ())), 64
    field = solve(2 * torch.randn(count + held_out, SIZE, SIZE), torch.full((count + held_out,), 0.1), 5)
    conductivity = torch.empty(count + held_out).uniform_(0.01, 0.1)
    unstable = sorted(torch.randperm(count)[: count // 60].tolist())
    conductivity[unstable] = torch.empty(len(unstable)).uniform_(0.31, 0.35)
    after = solve(field, conductivity, STEPS)
    if mended:
        after[unstable] = solve(field[unstable], conductivity[unstable], 4 * STEPS, 0.25)
    return Program(
        model=Emulator(int(torch.randint(12, 17, ()))),
        rows=TensorDataset(field[:count], conductivity[:count], after[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3, weight_decay=1e-4),
        evaluation=[field[count:], conductivity[count:], after[count:]],
        guilty=Guilty("data", rows=tuple(unstable)),
        batch_size=16,
        steps=300,
    )
