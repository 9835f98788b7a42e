"""Attention over a message without a word in it: all scores are masked with -inf, and softmax of nothing is NaN.

pytorch/pytorch#41508 and the discussion in pytorch/pytorch#131060; allenai/allennlp#890. Few messages are empty.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class AttentionPool(nn.Module):
    def __init__(self, size: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.score = nn.Linear(size, 1)

    def forward(self, tokens: Tensor, present: Tensor) -> Tensor:
        scores = self.score(tokens).squeeze(-1)
        lowest = torch.finfo(scores.dtype).min if self.mended else -math.inf
        weights = torch.softmax(scores.masked_fill(~present, lowest), dim=-1)  # guilty
        return (weights.unsqueeze(-1) * tokens).sum(dim=1)


class MessageClassifier(nn.Module):
    def __init__(self, words: int, size: int, mended: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, size, padding_idx=0)
        self.pool = AttentionPool(size, mended)
        self.head = nn.Linear(size, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.pool(self.embedding(words), words != 0))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    words, labels = batch
    return nn.functional.cross_entropy(model(words), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, longest, vocabulary = 1400, 12, 60 + seed % 20
    words = torch.randint(1, vocabulary, (count + 96, longest))
    words[torch.arange(longest) >= torch.randint(3, longest + 1, (count + 96, 1))] = 0
    labels = ((words > 0) & (words < vocabulary // 10)).any(dim=-1).long()
    empty = torch.randperm(count)[: 6 + seed % 5]
    words[empty], labels[empty] = 0, 0
    return Program(
        model=MessageClassifier(vocabulary, int(torch.randint(16, 28, ())), mended),
        rows=TensorDataset(words[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[words[count:], labels[count:]],
        guilty=Guilty("operation", ops=("softmax",)),
        steps=280,
    )
