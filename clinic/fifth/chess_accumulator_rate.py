"""A chess position is judged by a small network on a sum of embeddings of its pieces (NNUE), trained at a rate of 0.1.

The clipped units between 0 and 1 have no slope once they are pushed out, and Adam pushes them all out in the first
steps. The loss stands at what a constant judgement would reach, without a jump or a NaN. Whoever ports a trainer from
one engine to another meets it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

KINDS, SQUARES = 10, 64


class Judge(nn.Module):
    """The sum of what each piece adds, and two clipped layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pieces = nn.EmbeddingBag(KINDS * SQUARES, width, mode="sum")
        nn.init.normal_(self.pieces.weight, std=0.1)
        self.inner, self.outer = nn.Linear(width, 32), nn.Linear(32, 1)

    def forward(self, pieces: Tensor) -> Tensor:
        first = (self.pieces(pieces) + 0.5).clamp(0, 1)
        return self.outer(self.inner(first).clamp(0, 1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    pieces, won = batch
    return F.mse_loss(model(pieces).sigmoid(), won)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, width = int(torch.randint(3000, 4000, ())), 500, int(torch.randint(48, 80, ()))
    count = int(torch.randint(8, 14, ()))
    kind = torch.randint(KINDS, (rows + held_out, count))
    square = torch.rand(rows + held_out, SQUARES).argsort(-1)[:, :count]
    worth = torch.tensor([1.0, 3.0, 3.2, 5.0, 9.0]).repeat(2) * torch.tensor([1.0, -1.0]).repeat_interleave(5)
    place = 0.5 * torch.randn(KINDS, SQUARES)
    merit = (worth[kind] + place[kind, square]).sum(-1)
    pieces, won = kind * SQUARES + square, (0.3 * merit).sigmoid()
    return Program(
        model=Judge(width),
        rows=TensorDataset(pieces[:rows], won[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3 if mended else 0.1),
        evaluation=[pieces[rows:], won[rows:]],
        guilty=Guilty("explosion"),
        batch_size=64,
        steps=400,
    )
