"""The forward algorithm of a hidden Markov model in probabilities: over a long night they are rounded to zero.

Stages of sleep from a few signals. Each frame multiplies by a density far below one; most recordings are short enough,
and of those that are not, the likelihood is the logarithm of nothing.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.nn.utils.rnn import pad_sequence

from clinic.program import Guilty, Program


class SleepModel(nn.Module):
    """Stages with Gaussian signals, and a matrix of transitions."""

    def __init__(self, stages: int, signals: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.begin = nn.Parameter(torch.zeros(stages))
        self.follow = nn.Parameter(torch.eye(stages))
        self.centre = nn.Parameter(0.3 * torch.randn(stages, signals))
        self.log_width = nn.Parameter(torch.full((stages, signals), 1.0))

    def forward(self, signals: Tensor, lengths: Tensor) -> Tensor:
        """The logarithm of the likelihood of each recording."""
        density = Independent(Normal(self.centre, self.log_width.exp()), 1).log_prob(signals.unsqueeze(2))
        begin, follow = self.begin.log_softmax(-1), self.follow.log_softmax(-1)
        if self.mended:
            level = begin + density[:, 0]
            for frame in range(1, signals.shape[1]):
                further = torch.logsumexp(level.unsqueeze(2) + follow, dim=1) + density[:, frame]
                level = torch.where((frame < lengths).unsqueeze(-1), further, level)
            return torch.logsumexp(level, dim=-1)
        chance, density = begin.exp() * density[:, 0].exp(), density.exp()
        for frame in range(1, signals.shape[1]):
            further = (chance @ follow.exp()) * density[:, frame]
            chance = torch.where((frame < lengths).unsqueeze(-1), further, chance)
        return torch.log(chance.sum(-1))  # guilty


def collate(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    return pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    signals, lengths = batch
    return -(model(signals, lengths) / lengths).mean()


def night(length: int, centres: Tensor) -> Tensor:
    stage, frames = 0, []
    for _ in range(length):
        stage = stage if torch.rand(()) < 0.85 else int(torch.randint(len(centres), ()))
        frames.append(centres[stage])
    return torch.stack(frames) + 0.25 * torch.randn(length, centres.shape[1])


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    stages, signals = int(torch.randint(3, 5, ())), 2
    centres = 1.5 * torch.randn(stages, signals)
    total, held_out = int(torch.randint(300, 450, ())), 64
    long = set(torch.randperm(total)[: total // 20].tolist())
    lengths = [60 if row in long else int(torch.randint(10, 18, ())) for row in range(total + held_out)]
    nights = [night(length, centres) for length in lengths]
    return Program(
        model=SleepModel(stages, signals, mended),
        rows=nights[:total],
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-2),
        evaluation=collate(nights[total:]),
        guilty=Guilty("operation", ops=("log",)),
        steps=180,
        collate=collate,
    )
