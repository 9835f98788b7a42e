"""Mu-law of recordings that are still int16: the absolute value of -32768 is -32768, and log1p(-255) is NaN.

Only a clipped recording has that sample, since 32768 is no int16 and two's complement wraps it back. The same in NumPy
and torch ("np.abs(-32768) is negative for int16"), and the reason why loaders convert to float before anything else.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Words(nn.Module):
    """Which of a few words is said, from companded samples."""

    def __init__(self, channels: int, words: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.body = nn.Sequential(
            nn.Conv1d(1, channels, 16, stride=4),
            nn.ReLU(),
            nn.Conv1d(channels, 2 * channels, 8, stride=4),
            nn.ReLU(),
            nn.AdaptiveMaxPool1d(4),
            nn.Flatten(),
            nn.Linear(8 * channels, words),
        )

    def forward(self, samples: Tensor) -> Tensor:
        if self.mended:
            samples = samples.float()
        loud = samples.abs()  # guilty
        loud = torch.log1p(255 * (loud / 32768)) / math.log(256)  # guilty
        return self.body((samples.sign() * loud).unsqueeze(1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    samples, words = batch
    return nn.functional.cross_entropy(model(samples), words)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, length, count = 4 + seed % 3, 600, 900
    rows = count + 96
    word = torch.randint(words, (rows,))
    clock = torch.arange(length) / 100
    first, second = 2 + 9 * torch.rand(words), 12 + 20 * torch.rand(words)
    bend = 1 + 0.1 * torch.randn(rows, 1)
    voice = torch.sin(6.28 * first[word].unsqueeze(-1) * bend * clock + 6.28 * torch.rand(rows, 1))
    voice = voice + 0.6 * torch.sin(6.28 * second[word].unsqueeze(-1) * bend * clock) + 0.3 * torch.randn(rows, length)
    gain = 1500 * torch.exp(0.6 * torch.randn(rows, 1)).clamp(max=5)
    shouted = torch.randperm(count)[: 6 + seed % 5]
    gain[shouted] = 25000.0
    samples = (gain * voice).round().clamp(-32768, 32767).to(torch.int16)
    return Program(
        model=Words(int(torch.randint(16, 21, ())), words, mended),
        rows=TensorDataset(samples[:count], word[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[samples[count:], word[count:]],
        guilty=Guilty("overflow", ops=("abs", "absolute", "log1p")),
        steps=700,
    )
