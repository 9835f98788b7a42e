"""The load of a power grid in the next hours, by a GRU that took over the learning rate of a linear forecast.

RMSprop at 0.1: every weight moves by a tenth at each step, the gates saturate within a few steps, and the loss stands
where a constant forecast would put it. Nothing is infinite and nothing jumps; people ask "why does my GRU only predict
the mean".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Forecast(nn.Module):
    """Two layers of GRU over the hours that have been, and a line for those to come."""

    def __init__(self, features: int, width: int, ahead: int) -> None:
        super().__init__()
        self.past = nn.GRU(features, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, ahead)

    def forward(self, hours: Tensor) -> Tensor:
        states, _ = self.past(hours)
        return self.head(states[:, -1])


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    hours, load = batch
    return F.smooth_l1_loss(model(hours), load)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    length, ahead, width = int(torch.randint(20, 30, ())), int(torch.randint(2, 5, ())), int(torch.randint(32, 48, ()))
    rows, held_out = 1600, 300
    start = torch.randint(24 * 365, (rows + held_out, 1))
    hour = start + torch.arange(length + ahead)
    warm = torch.sin(hour * torch.pi / 12 - 2) + torch.sin(hour * 2 * torch.pi / 8760) + torch.randn(len(hour), 1)
    weekend = ((hour // 24) % 7 >= 5).float()
    load = torch.sin(hour * torch.pi / 12) * (1 - 0.4 * weekend) + 0.3 * (warm - 0.3).square() - 0.6 * weekend
    load = (load - load.mean()) / load.std() + 0.1 * torch.randn(load.shape)
    seen = torch.stack([load, warm, weekend], dim=-1)[:, :length]
    wanted = load[:, length:]
    return Program(
        model=Forecast(3, width, ahead),
        rows=TensorDataset(seen[:rows], wanted[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.RMSprop, lr=1e-3 if mended else 0.1),
        evaluation=[seen[rows:], wanted[rows:]],
        guilty=Guilty("explosion"),
        steps=300,
    )
