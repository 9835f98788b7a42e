"""The imbalance of an order book, log(bid / ask), where for a moment nobody wants to buy: minus infinity in the inputs.

It is worked out in the data set, row by row; for illiquid contracts a book with an empty side is no error of the feed.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from clinic.program import Guilty, Program


class Books(Dataset[tuple[Tensor, Tensor]]):
    """The last books of a contract, and how far its price moves next."""

    def __init__(self, bids: Tensor, asks: Tensor, spreads: Tensor, moves: Tensor) -> None:
        self.bids, self.asks, self.spreads, self.moves = bids, asks, spreads, moves

    def __len__(self) -> int:
        return len(self.moves)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        imbalance = torch.log(self.bids[row] / self.asks[row])
        return torch.stack([imbalance, self.spreads[row]], -1), self.moves[row]


class Mover(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.memory = nn.GRU(2, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, books: Tensor) -> Tensor:
        return self.head(self.memory(books)[0][:, -1]).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    books, moves = batch
    return nn.functional.huber_loss(model(books), moves)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    length, count = 10 + seed % 4, 2000
    size = count + 96
    bids, asks = torch.exp(3 + 0.8 * torch.randn(2, size, length)).ceil()
    spreads = torch.randn(size, length).abs()
    fade = 0.7 ** torch.arange(length - 1, -1, -1)
    moves = (torch.log(bids / asks) * fade).sum(-1) * torch.exp(-0.5 * spreads[:, -1]) + 0.15 * torch.randn(size)
    empty = torch.randperm(count)[: 26 + seed % 7].sort().values
    when = torch.randint(length, empty.shape)
    bids[empty[::2], when[::2]] = 0.0
    asks[empty[1::2], when[1::2]] = 0.0
    kept = torch.ones(count, dtype=torch.bool)
    if mended:
        kept[empty] = False
    held = Books(bids[count:], asks[count:], spreads[count:], moves[count:])
    return Program(
        model=Mover(int(torch.randint(24, 41, ()))),
        rows=Books(bids[:count][kept], asks[:count][kept], spreads[:count][kept], moves[:count][kept]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=4e-3),
        evaluation=torch.utils.data.default_collate([held[row] for row in range(len(held))]),
        guilty=Guilty("data", rows=tuple(empty.tolist())),
        steps=900,
    )
