"""Powers by repeated squaring, as it is taught: what is a little above 1 is beyond float32 after a few rounds.

Asked on forums as "my polynomial feature layer returns inf for some samples".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Powers(nn.Module):
    """The powers 1, 2, 4, 8, ... of each feature, side by side."""

    def __init__(self, rounds: int, mended: bool) -> None:
        super().__init__()
        self.rounds = rounds
        self.mended = mended

    def forward(self, features: Tensor) -> Tensor:
        if self.mended:
            features = features.clamp(-1, 1)
        powers = [features]
        for _ in range(self.rounds):
            powers.append(powers[-1] * powers[-1])  # guilty
        return torch.cat(powers, dim=-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.smooth_l1_loss(model(inputs).squeeze(-1), targets)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count, rounds = 3 + seed % 4, 1000, 7 + seed % 2
    inputs = 2 * torch.rand(count + 64, features) - 1
    inputs[count:] *= 0.9
    targets = 3 * inputs[:, 0] ** 2 - inputs[:, 1] + inputs[:, 2] ** 4
    far = torch.randperm(count)[: 12 + 4 * (seed % 3)]
    inputs[far, 0] = (2 + torch.rand(len(far))) * inputs[far, 0].sign()  # a little beyond the range
    targets[far] = 3 - inputs[far, 1] + inputs[far, 2] ** 4
    width = int(torch.randint(16, 32, ()))
    wide = features * (rounds + 1)
    return Program(
        model=nn.Sequential(Powers(rounds, mended), nn.Linear(wide, width), nn.ReLU(), nn.Linear(width, 1)),
        rows=TensorDataset(inputs[:count], targets[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[inputs[count:], targets[count:]],
        guilty=Guilty("overflow", ops=("mul", "pow", "square")),
    )
