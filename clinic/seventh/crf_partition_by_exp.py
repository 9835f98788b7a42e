"""A tagger with a conditional random field sums its partition function outside the logarithm, step by step.

It works at first; as the scores grow, the sums of the longer sentences exceed float32: the loss is inf, then NaN.
Known to everybody who wrote a CRF from the formula in a paper before hearing of log-sum-exp.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Tagger(nn.Module):
    def __init__(self, words: int, tags: int, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.words = nn.Embedding(words, width)
        self.reader = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.emission = nn.Linear(2 * width, tags)
        self.transition = nn.Parameter(torch.zeros(tags, tags))

    def score(self, emissions: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        own = emissions.gather(2, tags.unsqueeze(-1)).squeeze(-1)
        moves = self.transition[tags[:, :-1], tags[:, 1:]]
        return (own * mask).sum(dim=1) + (moves * mask[:, 1:]).sum(dim=1)

    def log_partition(self, emissions: Tensor, mask: Tensor) -> Tensor:
        if self.mended:
            alpha = emissions[:, 0]
            for step in range(1, emissions.shape[1]):
                moved = (alpha.unsqueeze(2) + self.transition).logsumexp(dim=1) + emissions[:, step]
                alpha = torch.where(mask[:, step, None] > 0, moved, alpha)
            return alpha.logsumexp(dim=-1)
        alpha, moves = emissions[:, 0].exp(), self.transition.exp()
        for step in range(1, emissions.shape[1]):
            moved = torch.matmul(alpha, moves) * emissions[:, step].exp()  # guilty
            alpha = torch.where(mask[:, step, None] > 0, moved, alpha)
        return alpha.sum(dim=-1).log()

    def forward(self, words: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        emissions = self.emission(self.reader(self.words(words))[0])
        return self.log_partition(emissions, mask) - self.score(emissions, tags, mask)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return model(*batch).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, tags, length, count = 40, 5 + seed % 3, 26, 800
    text = torch.randint(words, (count + 96, length))
    labels = (text + text.roll(1, dims=1) % 2) % tags
    lengths = torch.randint(8, 19, (count + 96,))
    long = torch.randperm(count)[: 60 + 20 * (seed % 3)]
    lengths[long] = torch.randint(22, length + 1, (len(long),))
    mask = (torch.arange(length) < lengths.unsqueeze(-1)).float()
    return Program(
        model=Tagger(words, tags, int(torch.randint(16, 25, ())), mended),
        rows=TensorDataset(text[:count], labels[:count], mask[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[text[count:], labels[count:], mask[count:]],
        guilty=Guilty("overflow", ops=("matmul", "mul")),
        steps=260,
    )
