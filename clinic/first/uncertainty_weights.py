"""Two tasks weighed by learned variances: as a task gets easy its variance shrinks, steps over zero, and has no root.

QunBB/DeepLearning#1, "If uncertainty_weight[i] is negative then tf.log(uncertainty_weight[i]) will be nan". It comes
late, and for good.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class TwoTasks(nn.Module):
    def __init__(self, features: int, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.body = nn.Sequential(nn.Linear(features, width), nn.ReLU())
        self.depth = nn.Linear(features, 1)
        self.normal = nn.Linear(width, 3)
        self.variance = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(inputs)
        return self.depth(inputs).squeeze(-1), self.normal(hidden)

    def weigh(self, errors: Tensor) -> Tensor:
        variance = self.variance.clamp(min=1e-2) if self.mended else self.variance
        sigma = torch.sqrt(variance)  # guilty
        return (errors / (2 * sigma**2) + sigma.log()).sum()


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, depth, normal = batch
    depths, normals = model(inputs)
    errors = [nn.functional.mse_loss(depths, depth), nn.functional.mse_loss(normals, normal)]
    return model.weigh(torch.stack(errors))


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 6 + seed % 4, 900
    inputs = torch.randn(count + 96, features)
    depth = 0.2 * inputs[:, 0] - 0.1 * inputs[:, 1]  # easy, without noise
    normal = torch.sin(inputs[:, :3] + inputs[:, 3:4])
    tensors = [inputs, depth, normal]
    rate = 0.008 + 0.002 * (seed % 4)
    return Program(
        model=TwoTasks(features, int(torch.randint(48, 80, ())), mended),
        rows=TensorDataset(*(tensor[:count] for tensor in tensors)),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=rate),
        evaluation=[tensor[count:] for tensor in tensors],
        guilty=Guilty("operation", ops=("sqrt",)),
        steps=280,
    )
