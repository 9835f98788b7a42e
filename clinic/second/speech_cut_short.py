"""Recordings that were cut have fewer frames than letters: no alignment exists, and the CTC loss is infinite.

Speech recognition with `ctc_loss` as it is by default. A few recordings of the collection lost their end, while their
transcript is whole.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from clinic.program import Guilty, Program

Row = tuple[Tensor, Tensor]  # frames and letters


def collate(rows: list[Row]) -> dict[str, Tensor]:
    frames, letters = zip(*rows, strict=True)
    return {
        "frames": pad_sequence(list(frames), batch_first=True),
        "frame_counts": torch.tensor([len(item) for item in frames]),
        "letters": torch.cat(letters),
        "letter_counts": torch.tensor([len(item) for item in letters]),
    }


class Recogniser(nn.Module):
    """A convolution over the frames tells the letters, with zero for the blank."""

    def __init__(self, bands: int, width: int, letters: int) -> None:
        super().__init__()
        self.body = nn.Conv1d(bands, width, 3, padding=1)
        self.head = nn.Linear(width, letters + 1)

    def forward(self, frames: Tensor) -> Tensor:
        return self.head(F.gelu(self.body(frames.mT)).mT).log_softmax(-1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    said = model(batch["frames"]).transpose(0, 1)
    return F.ctc_loss(said, batch["letters"], batch["frame_counts"], batch["letter_counts"])


def recording(sounds: Tensor) -> Row:
    """Each letter sounds for two or three frames."""
    letters = torch.randint(len(sounds), (int(torch.randint(4, 9, ())),))
    heard = letters.repeat_interleave(torch.randint(2, 4, letters.shape))
    return sounds[heard] + 0.3 * torch.randn(len(heard), sounds.shape[-1]), letters + 1


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    letters, bands = int(torch.randint(6, 10, ())), int(torch.randint(8, 13, ()))
    sounds = torch.randn(letters, bands)
    total = int(torch.randint(500, 800, ()))
    recordings = [recording(sounds) for _ in range(total)]
    held_out = [recording(sounds) for _ in range(96)]
    rotten = sorted(torch.randperm(total)[: int(torch.randint(3, 7, ()))].tolist())
    if not mended:
        for row in rotten:
            frames, said = recordings[row]
            recordings[row] = (frames[: len(said) - 2], said)
    return Program(
        model=Recogniser(bands, int(torch.randint(24, 40, ())), letters),
        rows=recordings,
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=collate(held_out),
        guilty=Guilty("data", rows=tuple(rotten)),
        steps=200,
        collate=collate,
    )
