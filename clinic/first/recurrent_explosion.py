"""A recurrent net with ReLU over long sequences: each step multiplies, and so does each step back.

pytorch/pytorch#2623, "How to handle exploding/vanishing gradient"; Marcovaldong/lstmp.pytorch#2 ends with "just clip
the gradients to a max norm of 1.0".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Adder(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.rnn = nn.RNN(2, size, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(size, 1)
        nn.init.eye_(self.rnn.weight_hh_l0)

    def forward(self, sequences: Tensor) -> Tensor:
        states, _ = self.rnn(sequences)
        return self.head(states[:, -1]).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    sequences, sums = batch
    return nn.functional.mse_loss(model(sequences), sums)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    length, count = 40 + seed % 21, 500
    values = torch.rand(count + 64, length)
    marked = (torch.rand(count + 64, length) < 0.4).float()
    sums = (values * marked).sum(dim=-1)
    sequences = torch.stack([values, marked], dim=-1)
    return Program(
        model=Adder(int(torch.randint(16, 28, ()))),
        rows=TensorDataset(sequences[:count], sums[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.006),  # guilty
        evaluation=[sequences[count:], sums[count:]],
        guilty=Guilty("explosion"),
        steps=180,
        clip=1.0 if mended else None,
    )
