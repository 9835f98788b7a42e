"""An LSTM language model with the rate of twenty from the well-known example, but without the example's clipping.

`word_language_model` of pytorch/examples has lr=20 and clip=0.25; those who copy the one and leave out the other see
a perplexity of ten to the tenth after a few batches, and ask on forums what is wrong with their data.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class LanguageModel(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.recurrent = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(width, words)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, text: Tensor) -> Tensor:
        return self.decoder(self.recurrent(self.words(text))[0])


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (text,) = batch
    return nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, length, count = 24 + seed % 8, 16, 800
    follow = torch.rand(words, words).pow(30)
    text = torch.randint(words, (count + 96, 1))
    for _ in range(length):
        text = torch.cat([text, torch.multinomial(follow[text[:, -1]], 1)], dim=-1)
    return Program(
        model=LanguageModel(words, int(torch.randint(32, 49, ()))),
        rows=TensorDataset(text[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=20.0),
        evaluation=[text[count:]],
        guilty=Guilty("explosion"),
        batch_size=20,
        steps=400,
        clip=0.25 if mended else None,
    )
