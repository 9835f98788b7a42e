"""Turns of a dialogue are packed for a GRU, and a few of them have no words: a photo, a sticker, a stop word only.

`pack_padded_sequence` says "Length of all samples has to be greater than 0, but found an element in 'lengths' that is
<= 0". Asked again and again on forums, and it comes only with an unlucky batch.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class TurnClassifier(nn.Module):
    def __init__(self, words: int, width: int, acts: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, acts)

    def forward(self, words: Tensor) -> Tensor:
        lengths = (words != 0).sum(dim=-1)
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        _, last = self.recurrent(packed)
        return self.head(last[0])


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    words, acts = batch
    return nn.functional.cross_entropy(model(words), acts)


def turns(count: int, words: int, acts: int) -> tuple[Tensor, Tensor]:
    """What is meant shows in the first or the last word."""
    act = torch.randint(acts, (count,))
    lengths = torch.randint(2, 11, (count,))
    turn = torch.randint(1 + 3 * acts, words, (count, 10))
    turn[torch.arange(10) >= lengths.unsqueeze(-1)] = 0
    place = torch.where(torch.rand(count) < 0.5, torch.zeros_like(lengths), lengths - 1)
    turn[torch.arange(count), place] = 1 + 3 * act + torch.randint(3, (count,))
    return turn, act


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    acts, words, count = 4 + seed % 3, 80, 1200
    turn, act = turns(count + 128, words, acts)
    empty = torch.randperm(count)[: 3 + 2 * (seed % 3)].sort().values
    turn[empty] = 0
    kept = torch.ones(count, dtype=torch.bool)
    if mended:
        kept[empty] = False
    return Program(
        model=TurnClassifier(words, int(torch.randint(32, 48, ())), acts),
        rows=TensorDataset(turn[:count][kept], act[:count][kept]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[turn[count:], act[count:]],
        guilty=Guilty("data", rows=tuple(empty.tolist())),
        steps=300,
    )
