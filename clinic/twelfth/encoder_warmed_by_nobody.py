"""A post-norm transformer encoder at the rate of the small MLP that it took the place of, and without a warm-up.

Nothing is infinite and nothing jumps: after the first steps the encoder gives the same answer for every sentence, and
the loss stands at the logarithm of the number of classes. Asked on forums as "nn.TransformerEncoder predicts the same
class for all inputs, loss stuck at ln(C)"; the answer is always a rate that is ten to fifty times lower.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class IntentEncoder(nn.Module):
    """Names what a sentence wants: one of its words gives it away."""

    def __init__(self, words: int, length: int, width: int, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(6)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, sentences: Tensor) -> Tensor:
        hidden = self.words(sentences) + self.places
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean(1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    sentences, intents = batch
    return nn.functional.cross_entropy(model(sentences), intents)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    classes, words, length, count = 4 + seed % 3, 60, 12, 800
    intents = torch.randint(classes, (count + 96,))
    sentences = torch.randint(2 * classes, words, (count + 96, length))
    clue = 2 * intents + torch.randint(2, intents.shape)
    sentences[torch.arange(count + 96), torch.randint(length, intents.shape)] = clue
    return Program(
        model=IntentEncoder(words, length, 32, classes),
        rows=TensorDataset(sentences[:count], intents[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-3 if mended else 2e-2),  # guilty
        evaluation=[sentences[count:], intents[count:]],
        guilty=Guilty("explosion"),
        steps=240,
    )
