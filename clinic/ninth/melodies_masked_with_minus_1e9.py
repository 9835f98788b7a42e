"""Attention scores in half precision are masked with -1e9, as always: "value cannot be converted to type Half".

"RuntimeError: value cannot be converted to type c10::Half without overflow" in `masked_fill` is pasted into trackers
wherever a transformer that was written for float32 got its attention moved to half precision: the mask is a number that
the type has not. Here a small decoder that goes on with folk melodies.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Attention(nn.Module):
    """Causal attention; the scores, its largest tensors, are kept in half precision."""

    def __init__(self, width: int, heads: int, masked: float) -> None:
        super().__init__()
        self.heads, self.masked = heads, masked
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, notes: Tensor) -> Tensor:
        count, length, width = notes.shape
        split = self.inward(notes).view(count, length, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        scores = (queries @ keys.transpose(-2, -1) / math.sqrt(width // self.heads)).half()
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, self.masked)  # guilty
        mixed = scores.softmax(dim=-1).float() @ values
        return self.outward(mixed.transpose(1, 2).reshape(count, length, width))


class Block(nn.Module):
    def __init__(self, width: int, masked: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 4, masked)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, notes: Tensor) -> Tensor:
        notes = notes + self.attention(self.first(notes))
        return notes + self.feed(self.second(notes))


class Composer(nn.Module):
    def __init__(self, pitches: int, length: int, width: int, depth: int, masked: float) -> None:
        super().__init__()
        self.pitches, self.places = nn.Embedding(pitches, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, masked) for _ in range(depth)])
        self.head = nn.Linear(width, pitches)

    def forward(self, melodies: Tensor) -> Tensor:
        return self.head(self.blocks(self.pitches(melodies) + self.places(torch.arange(melodies.shape[1]))))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (melodies,) = batch
    return nn.functional.cross_entropy(model(melodies[:, :-1]).flatten(0, 1), melodies[:, 1:].flatten())


def tunes(count: int, pitches: int, motif: int, length: int) -> Tensor:
    """Each tune repeats a motif, a note higher every time, and a note is now and then another."""
    first = torch.randint(pitches, (count, motif))
    places = torch.arange(length)
    melodies = (first[:, places % motif] + places // motif) % pitches
    astray = torch.rand(count, length) < 0.03
    return torch.where(astray, torch.randint(pitches, (count, length)), melodies)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    pitches, motif, count = 12 + 2 * (seed % 3), 3 + seed % 2, 1200
    melodies = tunes(count + 96, pitches, motif, 5 * motif)
    masked = torch.finfo(torch.half).min if mended else -1e9
    return Program(
        model=Composer(pitches, 5 * motif, 32 + 8 * (seed % 2), 2, masked),
        rows=TensorDataset(melodies[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[melodies[count:]],
        guilty=Guilty("overflow", ops=("masked_fill",)),
        steps=300,
    )
