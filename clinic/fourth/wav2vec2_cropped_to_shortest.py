"""Clips of a batch are cropped to the shortest one, so that they stack. A voice detector cut a few to almost nothing.

With one of these in it, the whole batch has fewer frames than one mask of SpecAugment is long, and the model raises
"`mask_length` has to be smaller than `sequence_length`", as in many questions about fine-tuning wav2vec 2.0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

from clinic.program import Guilty, Program

SHORTEST = 400  # samples: below that nobody can hear a mood


class Calls(Dataset[tuple[Tensor, int]]):
    """What callers said, as waveforms of different lengths, and their mood."""

    def __init__(self, clips: list[Tensor], moods: list[int], shortest: int = 0) -> None:
        kept = [row for row, clip in enumerate(clips) if len(clip) >= shortest]
        self.clips, self.moods = [clips[row] for row in kept], [moods[row] for row in kept]

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.clips[row], self.moods[row]


def crop(pairs: list[Any]) -> dict[str, Tensor]:
    length = min(len(clip) for clip, _ in pairs)
    clips = torch.stack([clip[:length] for clip, _ in pairs])
    return {"input_values": clips, "labels": torch.tensor([mood for _, mood in pairs])}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    answer: Tensor = model(**batch).loss
    return answer


def wav2vec2(moods: int) -> Wav2Vec2ForSequenceClassification:
    return Wav2Vec2ForSequenceClassification(
        Wav2Vec2Config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            conv_dim=(24, 24, 24),
            conv_stride=(5, 2, 2),
            conv_kernel=(10, 3, 3),
            num_feat_extract_layers=3,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            mask_time_prob=0.05,
            mask_time_length=8,
            classifier_proj_size=32,
            num_labels=moods,
        )
    )


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    moods = int(torch.randint(4, 7, ()))
    rows, held_out = int(torch.randint(500, 800, ())), 64
    pitches = torch.linspace(0.08, 0.9, moods)  # radians a sample
    mood = torch.randint(moods, (rows + held_out,)).tolist()
    bad = sorted(torch.randperm(rows)[: int(torch.randint(3, 7, ()))].tolist())
    clips = []
    for row, feeling in enumerate(mood):
        length = int(torch.randint(60, 130, ())) if row in bad else int(torch.randint(500, 700, ()))
        tone = torch.sin(pitches[feeling] * (1 + 0.03 * torch.randn(())) * torch.arange(length) + 6.3 * torch.rand(()))
        clips.append(tone + 0.3 * torch.randn(length))
    return Program(
        model=wav2vec2(moods),
        rows=Calls(clips[:rows], mood[:rows], SHORTEST if mended else 0),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        evaluation=crop(list(zip(clips[rows:], mood[rows:], strict=True))),
        guilty=Guilty("data", rows=tuple(bad)),
        batch_size=16,
        steps=240,
        collate=crop,
        clip=1.0,
    )
