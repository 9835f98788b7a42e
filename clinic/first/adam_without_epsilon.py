"""Adam with `eps=0`, to follow a paper to the letter: a word that no sentence held yet has a gradient of 0, over 0.

Asked on forums as "loss of the first batch is fine, loss of the second one is nan, my data has no nan in it".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Bag(nn.Module):
    def __init__(self, words: int, size: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, size)
        self.head = nn.Linear(size, classes)

    def forward(self, sentences: Tensor) -> Tensor:
        return self.head(self.embedding(sentences).mean(dim=1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    sentences, labels = batch
    return nn.functional.cross_entropy(model(sentences), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, classes, count = 150 + seed % 40, 3 + seed % 3, 1600
    sentences = torch.randint(words, (count + 96, 7))
    labels = torch.randn(words, classes)[sentences].sum(dim=1).argmax(dim=-1)
    return Program(
        model=Bag(words, int(torch.randint(8, 16, ())), classes),
        rows=TensorDataset(sentences[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=0.02, eps=1e-8 if mended else 0.0),  # guilty
        evaluation=[sentences[count:], labels[count:]],
        guilty=Guilty("optimizer"),
        steps=260,
    )
