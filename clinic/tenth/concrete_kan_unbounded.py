"""The strength of concrete by a Kolmogorov-Arnold network of Chebyshev polynomials, with the optimizer of a perceptron.

Chebyshev polynomials are tame between -1 and 1 and grow as a power beyond. The mixtures are scaled to that range, and
so the tanh of the examples was left out; but what the first layer gives is not, and SGD at 0.1 with momentum moves it
further out: within a few updates the second layer raises thousands to a power. Asked as "ChebyKAN loss explodes on my
own data set, NaN after some batches".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Chebyshev(nn.Module):
    """A layer in which each edge is a polynomial."""

    def __init__(self, inputs: int, outputs: int, degree: int) -> None:
        super().__init__()
        self.degree = degree
        self.weights = nn.Parameter(torch.randn(inputs, degree + 1, outputs) / (inputs * (degree + 1)) ** 0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        terms = [torch.ones_like(inputs), inputs]
        for _ in range(self.degree - 1):
            terms.append(2 * inputs * terms[-1] - terms[-2])
        return torch.einsum("bik,iko->bo", torch.stack(terms, dim=-1), self.weights)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    mixtures, strengths = batch
    return nn.functional.mse_loss(model(mixtures).squeeze(-1), strengths)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    parts, degree, count = 6 + seed % 3, 3 + seed % 2, 900
    mixtures = 2 * torch.rand(count + 96, parts) - 1
    water, age = mixtures[:, 0], mixtures[:, 1]
    strengths = -water + 0.8 * torch.tanh(4 * age) + 0.6 * torch.cos(3 * mixtures[:, 2]) * mixtures[:, 3]
    strengths = (strengths - strengths.mean()) / strengths.std()
    size = int(torch.randint(8, 12, ()))
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # guilty
    if mended:
        optimizer = partial(torch.optim.Adam, lr=5e-3)
    return Program(
        model=nn.Sequential(Chebyshev(parts, size, degree), Chebyshev(size, 1, degree)),
        rows=TensorDataset(mixtures[:count], strengths[:count]),
        loss=loss,
        optimizer=optimizer,
        evaluation=[mixtures[count:], strengths[count:]],
        guilty=Guilty("explosion"),
        steps=400,
    )
