"""Mean and standard deviation over the frames of a recording: of a recording of one frame, `std` is NaN.

pyannote/pyannote-audio#2047, "return zero std for single-frame input instead of NaN"; said in pytorch/pytorch#4320 too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from clinic.program import Guilty, Program


class Speakers(nn.Module):
    def __init__(self, channels: int, width: int, speakers: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.frames = nn.Sequential(nn.Linear(channels, width), nn.Tanh())
        self.head = nn.Linear(2 * width, speakers)

    def pool(self, frames: Tensor) -> Tensor:
        if self.mended and len(frames) == 1:
            return torch.cat([frames[0], torch.zeros_like(frames[0])])
        return torch.cat([frames.mean(dim=0), frames.std(dim=0)])  # guilty

    def forward(self, recordings: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.frames(recordings)
        return self.head(torch.stack([self.pool(one[:length]) for one, length in zip(hidden, lengths, strict=True)]))


def pad(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    recordings = [recording for recording, _ in rows]
    lengths = torch.tensor([len(recording) for recording in recordings])
    return pad_sequence(recordings, batch_first=True), lengths, torch.tensor([speaker for _, speaker in rows])


def loss(model: nn.Module, batch: Any) -> Tensor:
    recordings, lengths, speakers = batch
    return nn.functional.cross_entropy(model(recordings, lengths), speakers)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    channels, speakers, count = 6, 3 + seed % 3, 500
    voices, ranges = torch.randn(speakers, channels), 0.3 + torch.rand(speakers, channels)
    lengths = torch.randint(4, 20, (count + 64,))
    lengths[torch.randperm(count)[: 4 + seed % 4]] = 1
    rows = []
    for length in lengths.tolist():
        speaker = int(torch.randint(speakers, ()))
        rows.append((voices[speaker] + ranges[speaker] * torch.randn(length, channels), speaker))
    return Program(
        model=Speakers(channels, int(torch.randint(10, 18, ())), speakers, mended),
        rows=rows[:count],
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=pad(rows[count:]),
        guilty=Guilty("operation", ops=("std",)),
        batch_size=24,
        steps=160,
        collate=pad,
    )
