"""The best ridge strength of a linear baseline, found with scikit-learn, was handed to SGD as its `weight_decay`.

There the penalty is on the sum over all samples, here on the mean: the decay is hundreds of times too strong, each
step turns the weights' sign and makes them larger. Asked as "my alpha of 100 works in Ridge, PyTorch gives nan".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    genes, responses = batch
    return nn.functional.mse_loss(model(genes), responses)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, drugs, count = int(torch.randint(20, 40, ())), 2 + seed % 3, 1200
    genes = torch.randn(count + 128, features)
    responses = 2 * genes @ torch.randn(features, drugs) / features**0.5
    responses = responses + 0.5 * torch.randn(count + 128, drugs)
    alpha = 100.0 + 10 * (seed % 4)
    return Program(
        model=nn.Linear(features, drugs),
        rows=TensorDataset(genes[:count], responses[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=alpha / count if mended else alpha),
        evaluation=[genes[count:], responses[count:]],
        guilty=Guilty("explosion"),
        steps=300,
    )
