"""The return of the next hour from a window of prices, with an LSTM: the notebook that everyone has copied once.

Its author left out the scaler. Prices are in the tens of thousands, every gate of the LSTM is at its end from the first
step on, no gradient comes through, and the network learns one constant. Nothing is NaN and nothing raises.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from clinic.program import Guilty, Program


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """All windows of some hours, and the return in percent after each."""

    def __init__(self, prices: Tensor, hours: int, first: int, last: int) -> None:
        self.prices, self.hours, self.first, self.last = prices, hours, first, last

    def __len__(self) -> int:
        return self.last - self.first - self.hours

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        begin = self.first + row
        end = begin + self.hours
        return self.prices[begin:end], 100 * (self.prices[end] / self.prices[end - 1] - 1)


class Trader(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def scaled(self, prices: Tensor) -> Tensor:
        return prices

    def forward(self, prices: Tensor) -> Tensor:
        states, _ = self.lstm(self.scaled(prices).unsqueeze(-1))  # guilty
        out: Tensor = self.head(states[:, -1]).squeeze(-1)
        return out


class ScaledTrader(Trader):
    def scaled(self, prices: Tensor) -> Tensor:
        return 50 * (prices / prices.mean(1, keepdim=True) - 1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    prices, returns = batch
    return F.mse_loss(model(prices), returns)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    hours, known, held_out = int(torch.randint(12, 21, ())), 2500, 300
    level = float(20000 + 30000 * torch.rand(()))
    # an index that swings around its level, with a little chance in every hour
    noise, swing = 0.004 * torch.randn(known + held_out), [0.0, 0.01]
    for chance in noise[2:].tolist():
        swing.append(1.72 * swing[-1] - 0.88 * swing[-2] + chance)
    prices = level * torch.tensor(swing).exp()
    hidden = int(torch.randint(24, 41, ()))
    held = Windows(prices, hours, known, known + held_out)
    return Program(
        model=ScaledTrader(hidden) if mended else Trader(hidden),
        rows=Windows(prices, hours, 0, known),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=torch.utils.data.default_collate([held[row] for row in range(len(held))]),
        guilty=Guilty("overflow", ops=("lstm", "LSTM", "sigmoid", "tanh")),
        batch_size=64,
        steps=300,
    )
