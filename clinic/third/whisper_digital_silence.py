"""The spectrogram of a recording that was padded with zeros: the logarithm of no energy is minus infinity.

Commands by voice, for a model like Whisper. A microphone is never silent and the features of nearly all recordings are
finite; a few were padded by the program that cut them.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from transformers import WhisperConfig, WhisperForConditionalGeneration

from clinic.program import Guilty, Program

BANDS, FRAMES, WINDOW = 16, 40, 32


class Commands(torch.utils.data.Dataset):
    """Reads a wave and makes a spectrogram of it."""

    def __init__(self, waves: Tensor, letters: Tensor) -> None:
        self.waves, self.letters = waves, letters

    def __len__(self) -> int:
        return len(self.waves)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        spectrum = torch.fft.rfft(self.waves[row].view(FRAMES, WINDOW)).abs().square()
        features = torch.log10(spectrum[:, 1 : BANDS + 1]).T
        return {"input_features": (features + 1) / 2, "labels": self.letters[row]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    commands, alphabet = int(torch.randint(5, 9, ())), 32
    rows, held_out = int(torch.randint(500, 800, ())), 64
    spelled = torch.randint(3, alphabet, (commands, 4))
    said = torch.randint(commands, (rows + held_out,))
    pitch = 2 * math.pi * (2 + 1.7 * said) / WINDOW
    waves = torch.sin(pitch.unsqueeze(-1) * torch.arange(FRAMES * WINDOW) + 6.28 * torch.rand(rows + held_out, 1))
    waves = waves + 0.3 * torch.randn(rows + held_out, FRAMES * WINDOW)
    bad = sorted(torch.randperm(rows)[: int(torch.randint(3, 8, ()))].tolist())
    if not mended:
        for row in bad:
            waves[row, WINDOW * int(torch.randint(20, 36, ())) :] = 0
    data = Commands(waves, spelled[said])
    config = WhisperConfig(
        vocab_size=alphabet,
        num_mel_bins=BANDS,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        d_model=32,
        max_source_positions=FRAMES // 2,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    held = [data[row] for row in range(rows, rows + held_out)]
    return Program(
        model=WhisperForConditionalGeneration(config),
        rows=torch.utils.data.Subset(data, range(rows)),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        evaluation=torch.utils.data.default_collate(held),
        guilty=Guilty("data", rows=tuple(bad)),
        batch_size=16,
        steps=220,
    )
