"""The entropy of a policy over legal moves: the others have a probability of zero, and zero times log of zero is NaN.

Imitation of a game engine with an action mask and an entropy bonus, as in many policy-gradient scripts. The mask is a
large negative number and does no harm by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clinic.program import Guilty, Program


class Positions(torch.utils.data.Dataset):
    """A position, its legal moves, the move that the engine makes and how it judges the position."""

    def __init__(self, board: Tensor, legal: Tensor, move: Tensor, value: Tensor) -> None:
        self.columns = {"board": board, "legal": legal, "move": move, "value": value}

    def __len__(self) -> int:
        return len(self.columns["board"])

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: column[row] for name, column in self.columns.items()}


class Player(nn.Module):
    """A policy and a value on a common trunk."""

    def __init__(self, squares: int, moves: int, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(squares, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.policy = nn.Linear(width, moves)
        self.value = nn.Linear(width, 1)

    def forward(self, board: Tensor, legal: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(board)
        return self.policy(hidden).masked_fill(~legal, -1e9), self.value(hidden).squeeze(-1).tanh()


def entropy(logits: Tensor) -> Tensor:
    chances = logits.softmax(-1)
    return -(chances * chances.log()).sum(-1)  # guilty


def entropy_of_logits(logits: Tensor) -> Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def loss(model: nn.Module, batch: dict[str, Tensor], spread: Callable[[Tensor], Tensor] = entropy) -> Tensor:
    logits, value = model(batch["board"], batch["legal"])
    imitation = F.cross_entropy(logits, batch["move"])
    return imitation + F.mse_loss(value, batch["value"]) - 0.01 * spread(logits).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    squares, moves = int(torch.randint(12, 25, ())), int(torch.randint(8, 16, ()))
    rows, held_out = int(torch.randint(1000, 1800, ())), 128
    board = torch.randn(rows + held_out, squares)
    legal = torch.rand(rows + held_out, moves) < 0.6
    legal[:, 0] = True  # to pass
    merit = board @ torch.randn(squares, moves)
    move = merit.masked_fill(~legal, -1e9).argmax(-1)
    data = Positions(board, legal, move, (board[:, 0] - board[:, 1]).tanh())
    return Program(
        model=Player(squares, moves, int(torch.randint(48, 80, ()))),
        rows=torch.utils.data.Subset(data, range(rows)),
        loss=partial(loss, spread=entropy_of_logits) if mended else loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation={name: column[rows:] for name, column in data.columns.items()},
        guilty=Guilty("operation", ops=("log",)),
    )
