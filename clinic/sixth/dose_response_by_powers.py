"""How cells respond to doses of a substance: a network of its descriptors gives the parameters of the Hill equation.

The equation is written as in the textbook, with doses in mol per litre. For a steep and potent substance both the dose
and the half-effective dose to the power of the steepness are below what a float can hold, 0 / 0. Packages for such
curves take the logarithm of doses first; whoever copies the formula out of a paper meets this once curves get steep.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Hill(nn.Module):
    """Half-effective dose, steepness and largest response of a substance."""

    def __init__(self, descriptors: int, width: int, by_logarithms: bool) -> None:
        super().__init__()
        self.by_logarithms = by_logarithms
        self.body = nn.Sequential(nn.Linear(descriptors, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.potent, self.steep, self.top = (nn.Linear(width, 1) for _ in range(3))

    def forward(self, descriptors: Tensor, dose: Tensor) -> Tensor:
        state = self.body(descriptors)
        half, steep = self.potent(state) - 7, F.softplus(self.steep(state) + 0.5)
        if self.by_logarithms:
            effect = torch.sigmoid(steep * (dose.log() - half * 2.302585))
        else:
            power = dose**steep  # guilty
            effect = power / (power + (10**half) ** steep)  # guilty
        return self.top(state).sigmoid() * effect


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    descriptors, dose, response = batch
    return 100 * F.mse_loss(model(descriptors, dose), response)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    size, doses = int(torch.randint(8, 13, ())), 8
    count, held_out = int(torch.randint(1500, 2000, ())), 200
    descriptors = torch.randn(count + held_out, size)
    to_half, to_steep, to_top = (torch.randn(size, 1) / size**0.5 for _ in range(3))
    half = -7.3 + 1.5 * (descriptors @ to_half).tanh()
    steep = (2 * (0.7 * descriptors @ to_steep).exp()).clamp(0.5, 7)
    top = (1 + descriptors @ to_top).sigmoid()
    dose = 10 ** (torch.linspace(-10, -4.5, doses) + 0.1 * torch.randn(count + held_out, doses))
    response = top * torch.sigmoid(steep * (dose.log() - half * 2.302585))
    response = response + 0.02 * torch.randn_like(response)
    return Program(
        model=Hill(size, int(torch.randint(48, 81, ())), by_logarithms=mended),
        rows=TensorDataset(descriptors[:count], dose[:count], response[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[descriptors[count:], dose[count:], response[count:]],
        guilty=Guilty("operation", ops=("pow", "div", "truediv", "true_divide")),
        batch_size=32,
        steps=500,
    )
