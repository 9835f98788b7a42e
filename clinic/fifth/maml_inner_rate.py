"""Meta-learning the friction of robot joints: five inner steps for each joint, at an inner rate of 1.

MAML on small regression tasks. The inner rate comes from a repository for few-shot pictures, where the loss is a cross
entropy; with a squared error on a torque in newton metres the inner steps run away, and the slope through all five of
them is infinite in the first updates.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Friction(nn.Module):
    """Speed to torque, in three layers, with an own copy of all weights for each joint."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        sizes = [1, width, width, 1]
        pairs = list(pairwise(sizes))
        self.weights = nn.ParameterList([nn.Parameter((2 / a) ** 0.5 * torch.randn(a, b)) for a, b in pairs])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(1, b)) for _, b in pairs])
        self.rate = rate

    def apply_to(self, copies: list[Tensor], speed: Tensor) -> Tensor:
        half = len(copies) // 2
        for layer in range(half):
            speed = torch.baddbmm(copies[half + layer], speed, copies[layer])
            speed = speed.relu() if layer < half - 1 else speed
        return speed

    def forward(self, seen: Tensor, torque: Tensor, asked: Tensor) -> Tensor:
        with torch.enable_grad():
            copies = [item.expand(len(seen), *item.shape) for item in [*self.weights, *self.biases]]
            for _ in range(5):
                error = (self.apply_to(copies, seen) - torque).square().mean((1, 2)).sum()
                slopes = torch.autograd.grad(error, copies, create_graph=True)
                copies = [item - self.rate * slope for item, slope in zip(copies, slopes, strict=True)]  # guilty
        return self.apply_to(copies, asked)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    seen, torque, asked, answer = batch
    return (model(seen, torque, asked) - answer).square().mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, shots = int(torch.randint(600, 900, ())), 128, int(torch.randint(8, 14, ()))
    speed = 4 * torch.rand(rows + held_out, 2 * shots, 1) - 2
    dry, wet = 1 + 2 * torch.rand(rows + held_out, 1, 1), torch.rand(rows + held_out, 1, 1)
    torque = dry * (4 * speed).tanh() + wet * speed + 0.05 * torch.randn(speed.shape)
    columns = [speed[:, :shots], torque[:, :shots], speed[:, shots:], torque[:, shots:]]
    return Program(
        model=Friction(int(torch.randint(24, 40, ())), rate=0.02 if mended else 1.0),
        rows=TensorDataset(*(column[:rows] for column in columns)),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[column[rows:] for column in columns],
        guilty=Guilty("explosion"),
        batch_size=16,
        steps=250,
    )
