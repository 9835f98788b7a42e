"""Adam with an epsilon of zero, "as the formula has it": a word that is in no batch yet is divided 0 by 0.

The loss and all gradients are finite. After the first step every row of the embedding without a gradient is NaN, and
the next batch that holds such a word has a NaN loss. Met where eps is set to 0 so that the step does not depend on the
scale of the loss, where 1e-8 went through an `int`, or in half precision, in which 1e-8 is zero ("Adam + half
precision = NaNs?" on the PyTorch forum).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class WordModel(nn.Module):
    """Tells the next word from those before it."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.gru = nn.GRU(width, 2 * width, batch_first=True)
        self.head = nn.Linear(2 * width, words)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.gru(self.words(text))[0])


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (text,) = batch
    return nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def write(count: int, length: int, words: int) -> Tensor:
    """Sentences in which a word mostly settles the next one; some words are rare."""
    follower = torch.randperm(words)
    common = 1.0 / torch.arange(1, words + 1) ** 1.3
    text = torch.multinomial(common, count * length, replacement=True).view(count, length)
    for place in range(1, length):
        follows = torch.rand(count) < 0.7
        # only a sixth of the words follow another, so that the rare ones stay rare
        text[:, place] = torch.where(follows, follower[text[:, place - 1]] % (words // 6), text[:, place])
    return text


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, length, count = 160 + 20 * (seed % 3), 10, 800
    text = write(count + 96, length, words)
    return Program(
        model=WordModel(words, int(torch.randint(16, 25, ()))),
        rows=TensorDataset(text[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3, eps=1e-8 if mended else 0.0),  # guilty
        evaluation=[text[count:]],
        guilty=Guilty("optimizer"),
        batch_size=24,
        steps=260,
    )
