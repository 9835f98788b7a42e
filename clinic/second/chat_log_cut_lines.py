"""A log of messages in which a few lines are cut or lack their text: reading them raises.

Lines of JSON, written by a service that was restarted in mid-line now and then, and that wrote null for messages that
had been deleted. Nothing happens until the loader comes to such a row.
"""

from __future__ import annotations

import json
import zlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clinic.program import Guilty, Program

BUCKETS = 256


class Messages(torch.utils.data.Dataset):
    """Reads one line of the log as hashed words and the mood of the message."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, row: int) -> tuple[list[int], int]:
        record = json.loads(self.lines[row])
        words = record["text"].lower().split()
        return [zlib.crc32(word.encode()) % BUCKETS for word in words], record["mood"]


def collate(rows: list[tuple[list[int], int]]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(words) for words, _ in rows])
    return {
        "words": torch.tensor([word for words, _ in rows for word in words]),
        "offsets": lengths.cumsum(0) - lengths,
        "mood": torch.tensor([mood for _, mood in rows]),
    }


class BagOfWords(nn.Module):
    """The mean of the words, and two layers."""

    def __init__(self, width: int, moods: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(BUCKETS, width, mode="mean")
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, moods))

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.words(words, offsets))


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(model(batch["words"], batch["offsets"]), batch["mood"])


def message(moods: int) -> str:
    mood = int(torch.randint(moods, ()))
    length = int(torch.randint(5, 15, ()))
    telling = torch.rand(length) < 0.4
    numbers = torch.where(telling, 12 * mood + torch.randint(12, (length,)), 100 + torch.randint(200, (length,)))
    return json.dumps({"text": " ".join(f"Word{number}" for number in numbers.tolist()), "mood": mood})


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    moods, width = int(torch.randint(3, 6, ())), int(torch.randint(16, 32, ()))
    total = int(torch.randint(700, 1200, ()))
    lines = [message(moods) for _ in range(total + 128)]
    rotten = sorted(torch.randperm(total)[: int(torch.randint(2, 6, ()))].tolist())
    where_cut = torch.rand(total)
    if not mended:
        for count, row in enumerate(rotten):
            if count % 3 == 1:
                lines[row] = json.dumps({"text": None, "mood": json.loads(lines[row])["mood"]})
            else:
                lines[row] = lines[row][: 5 + int(where_cut[row] * (len(lines[row]) - 10))]
    held_out = Messages(lines[total:])
    return Program(
        model=BagOfWords(width, moods),
        rows=Messages(lines[:total]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=collate([held_out[row] for row in range(len(held_out))]),
        guilty=Guilty("data", rows=tuple(rotten)),
        steps=200,
        collate=collate,
    )
