"""A parallel corpus in two files, one of which lost a line: from there on, each sentence stands beside its neighbour's.

Nothing raises and nothing is infinite; the loss only settles high, and what comes out reads like an average sentence.
Asked about on OpenNMT's forum and for Tatoeba dumps that were cleaned file by file ("my model ignores the source").
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Translator(nn.Module):
    """Word for word, each seen with its neighbours."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.near = nn.Conv1d(width, 2 * width, 3, padding=1)
        self.out = nn.Linear(2 * width, words)

    def forward(self, source: Tensor) -> Tensor:
        hidden = torch.relu(self.near(self.words(source).mT)).mT
        return self.out(hidden)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    source, target = batch
    return nn.functional.cross_entropy(model(source).flatten(0, 1), target.flatten())


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, length, count = 30 + seed % 5, 7, 3000
    size = count + 96
    source = torch.randint(words, (size, length))
    meaning = torch.stack([torch.randperm(words), torch.randperm(words)])
    after_not = torch.zeros_like(source)
    after_not[:, 1:] = (source[:, :-1] < 5).long()
    target = meaning[after_not, source]
    lost = int(0.56 * count) + int(torch.randint(count // 20, ()))
    beside = target[:count].clone()
    beside[lost:-1] = target[lost + 1 : count]
    shifted = torch.arange(lost, count - 1)
    end = lost if mended else count - 1
    return Program(
        model=Translator(words, int(torch.randint(32, 49, ()))),
        rows=TensorDataset(source[:end], beside[:end]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[source[count:], target[count:]],
        guilty=Guilty("data", rows=tuple(shifted.tolist())),
        steps=900,
    )
