"""The scores of an attention are computed in half precision and without a scale: with loud inputs they pass 65504.

pytorch/pytorch#60940 ("whether the product is half and contains inf"); bentrevett/pytorch-seq2seq#191 meets that range.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class HalfAttention(nn.Module):
    """Casts to half "to save memory"."""

    def __init__(self, size: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.query = nn.Linear(size, size, bias=False)
        self.key = nn.Linear(size, size, bias=False)
        self.value = nn.Linear(size, size, bias=False)

    def forward(self, frames: Tensor) -> Tensor:
        queries, keys = self.query(frames), self.key(frames)
        if self.mended:
            scores = queries @ keys.transpose(-1, -2)
        else:
            scores = queries.half() @ keys.half().transpose(-1, -2)  # guilty
        return scores.float().softmax(dim=-1) @ self.value(frames)


class Sounds(nn.Module):
    def __init__(self, bands: int, size: int, classes: int, mended: bool) -> None:
        super().__init__()
        self.body = nn.Linear(bands, size)
        self.attention = HalfAttention(size, mended)
        self.head = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, classes))

    def forward(self, recordings: Tensor) -> Tensor:
        return self.head(self.attention(self.body(recordings)).mean(dim=1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    recordings, labels = batch
    return nn.functional.cross_entropy(model(recordings), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    bands, frames, classes, count = 8, 5 + seed % 4, 3 + seed % 3, 700
    timbre = torch.randn(classes, bands)
    labels = torch.randint(classes, (count + 96,))
    recordings = timbre[labels].unsqueeze(1) + 0.7 * torch.randn(count + 96, frames, bands)
    loudness = torch.exp(2 + 0.5 * torch.randn(count + 96, 1, 1))
    loud = torch.randperm(count)[: 14 + 7 * (seed % 3)]
    loudness[loud] = 3000.0
    recordings = loudness * recordings
    return Program(
        model=Sounds(bands, int(torch.randint(16, 28, ())), classes, mended),
        rows=TensorDataset(recordings[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[recordings[count:], labels[count:]],
        guilty=Guilty("overflow", ops=("matmul", "bmm")),
        steps=200,
    )
