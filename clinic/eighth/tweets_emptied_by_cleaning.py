"""Links, mentions and emojis are stripped from tweets; of a few nothing is left, and an empty one cannot be packed.

"RuntimeError: Length of all samples has to be greater than 0, but found an element in 'lengths' that is <= 0": a
classic of sentiment tutorials with `pack_padded_sequence`, once the cleaning is one's own.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from clinic.program import Guilty, Program


class Sentiment(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        _, state = self.recurrent(packed)
        return self.head(state[-1])


def collate(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    return {
        "ids": pad_sequence([ids for ids, _ in rows], batch_first=True),
        "lengths": torch.tensor([len(ids) for ids, _ in rows]),
        "labels": torch.tensor([label for _, label in rows]),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["ids"], batch["lengths"]), batch["labels"])


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, count = int(torch.randint(60, 120, ())), 800
    mood = torch.randn(words)
    tweets: list[tuple[Tensor, int]] = []
    for length in torch.randint(3, 14, (count + 128,)).tolist():
        ids = torch.randint(2, words, (length,))
        tweets.append((ids, int(mood[ids].sum() > 0)))
    emptied = torch.randperm(count)[: 2 + seed % 3].sort().values.tolist()
    for row in emptied:
        left = torch.ones(1, dtype=torch.long) if mended else torch.zeros(0, dtype=torch.long)  # one: an unknown word
        tweets[row] = left, tweets[row][1]
    return Program(
        model=Sentiment(words, int(torch.randint(16, 28, ()))),
        rows=tweets[:count],
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=collate(tweets[count:]),
        guilty=Guilty("data", rows=tuple(emptied)),
        collate=collate,
    )
