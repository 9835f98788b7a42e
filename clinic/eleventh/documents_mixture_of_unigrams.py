"""A mixture of unigrams: the likelihood of a document is written as the product of the chances of its words.

Short reports pass. Of a long one the product of some thirty chances of a hundredth each is below what a float can hold:
it is exactly zero under every topic, and its logarithm is minus infinity. The classic question about naive Bayes and
topic models ("my likelihood becomes 0"), answered by the sum of the logarithms.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from clinic.program import Guilty, Program

PAD = 0


class MixtureOfUnigrams(nn.Module):
    def __init__(self, topics: int, words: int) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.zeros(topics))
        self.words = nn.Parameter(0.3 * torch.randn(topics, words))

    def forward(self) -> tuple[Tensor, Tensor]:
        return torch.softmax(self.share, 0), torch.softmax(self.words, 1)


def loss(model: nn.Module, batch: Tensor, mended: bool) -> Tensor:
    share, words = model()
    chance = words[:, batch]  # topics x documents x places
    chance = torch.where(batch == PAD, torch.ones_like(chance), chance)
    if mended:
        likelihood = torch.logsumexp(share.log()[:, None] + chance.log().sum(-1), 0)
    else:
        likelihood = torch.log((share[:, None] * torch.prod(chance, -1)).sum(0))  # guilty
    return -likelihood.sum() / (batch != PAD).sum()


def collate(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=PAD)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    topics, words, count = int(torch.randint(4, 7, ())), int(torch.randint(180, 240, ())), 900
    of_topic = torch.softmax(2.5 * torch.randn(topics, words - 1), 1)
    lengths = torch.randint(5, 13, (count + 128,))
    lengths[torch.rand(count + 128) < 0.015] = int(torch.randint(34, 44, ()))
    documents = [
        1 + torch.multinomial(of_topic[int(torch.randint(topics, ()))], length, replacement=True)
        for length in lengths.tolist()
    ]
    return Program(
        model=MixtureOfUnigrams(topics, words),
        rows=documents[:count],
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=5e-2),
        evaluation=collate(documents[count:]),
        guilty=Guilty("operation", ops=("log", "prod")),
        collate=collate,
    )
