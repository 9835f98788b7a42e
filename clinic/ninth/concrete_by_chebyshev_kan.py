"""A Kolmogorov-Arnold layer of Chebyshev polynomials takes cos(n acos(tanh(x))), and has no slope where tanh is one.

The layer stands like this in the ChebyKAN repository that most people copied, and "loss becomes NaN after some batches"
follows. `tanh` is exactly one in float32 above nine; `acos` has an infinite slope there, and that of the cosine and of
`tanh` is zero. Here the strength of concrete, whose age in days nobody scaled, with a linear layer in front.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class ChebyshevLayer(nn.Module):
    """Each input goes through a learned polynomial for each output."""

    orders: Tensor

    def __init__(self, inputs: int, outputs: int, degree: int, bound: float) -> None:
        super().__init__()
        self.bound = bound
        self.coefficients = nn.Parameter(torch.randn(inputs, outputs, degree + 1) / (inputs * (degree + 1)))
        self.register_buffer("orders", torch.arange(degree + 1.0))

    def forward(self, inputs: Tensor) -> Tensor:
        squashed = inputs.tanh().clamp(-self.bound, self.bound)
        angles = squashed.unsqueeze(-1).acos()  # guilty
        return torch.einsum("bid,iod->bo", (angles * self.orders).cos(), self.coefficients)


class Strength(nn.Module):
    """How strong concrete is, from what went into it and how old it is."""

    def __init__(self, features: int, width: int, degree: int, bound: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, width),
            ChebyshevLayer(width, width, degree, bound),
            ChebyshevLayer(width, 1, degree, bound),
        )

    def forward(self, mixtures: Tensor) -> Tensor:
        return self.layers(mixtures).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    mixtures, strengths = batch
    return nn.functional.mse_loss(model(mixtures), strengths)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 5 + seed % 3, 960
    mixtures = torch.randn(count + 128, features)
    days = (3 + torch.randn(count + 128)).exp().clamp(max=365)  # most are tested in the first weeks
    mixtures[:, -1] = days
    ratio = mixtures[:, 0] - mixtures[:, 1]
    strengths = 1.5 * (days / 28).clamp(max=1) - 0.8 * ratio.tanh() + 0.3 * mixtures[:, 2] * mixtures[:, 3]
    return Program(
        model=Strength(features, int(torch.randint(10, 17, ())), 3 + seed % 2, 1 - 1e-6 if mended else 1.0),
        rows=TensorDataset(mixtures[:count], strengths[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[mixtures[count:], strengths[count:]],
        guilty=Guilty("operation", ops=("acos", "arccos")),
        steps=400,
    )
