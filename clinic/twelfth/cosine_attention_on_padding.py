"""Cosine attention (as in Swin v2) divides keys and queries by their norms, and padding has the norm zero.

`nn.Embedding(..., padding_idx=0)` gives a row of zeros, the projections have no bias, so that every padded place is
0/0. The mask comes after it and multiplies: NaN times zero is NaN. Asked as "NaN with padding_idx and cosine
similarity"; the answer is `F.normalize`, which has an epsilon, in the place of `x / x.norm()`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class CosineReader(nn.Module):
    """Reads padded sentences with one layer of cosine attention."""

    def __init__(self, words: int, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(8.0))
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def unit(self, vectors: Tensor) -> Tensor:
        if self.mended:
            return nn.functional.normalize(vectors, dim=-1)
        return vectors / vectors.norm(dim=-1, keepdim=True)  # guilty

    def forward(self, sentences: Tensor) -> Tensor:
        there = sentences != 0
        hidden = self.words(sentences)
        query, key = self.unit(self.query(hidden)), self.unit(self.key(hidden))
        scores = self.scale * query @ key.transpose(1, 2)
        scores = scores.masked_fill(~there.unsqueeze(1), -1e4)
        read = hidden + scores.softmax(-1) @ self.value(hidden)
        there = there.unsqueeze(-1).to(read.dtype)
        return self.head((read * there).sum(1) / there.sum(1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    sentences, ratings = batch
    return nn.functional.mse_loss(model(sentences), ratings)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, length, count = 50 + 5 * (seed % 4), 14, 900
    sentences = torch.randint(1, words, (count + 96, length))
    lengths = torch.randint(4, length + 1, (count + 96,))
    sentences[torch.arange(length) >= lengths.unsqueeze(-1)] = 0
    mood = torch.randn(words)
    mood[0] = 0.0
    ratings = 2.0 * mood[sentences].sum(1) / lengths.sqrt() + 0.1 * torch.randn(count + 96)
    return Program(
        model=CosineReader(words, int(torch.randint(6, 10, ())) * 4, mended),
        rows=TensorDataset(sentences[:count], ratings[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[sentences[count:], ratings[count:]],
        guilty=Guilty("operation", ops=("div", "norm")),
        steps=260,
    )
