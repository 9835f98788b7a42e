"""A small GPT-NeoX goes on with melodies; notes that an instrument lacks are forbidden by `-inf`, labels are smoothed.

The smoothed target gives every note a share, the forbidden ones too, and their logarithm is minus infinity: the loss is
infinite for every piece with a mask. See pytorch/pytorch on `label_smoothing` with logits of minus infinity.
"""

from __future__ import annotations

from functools import partial

import torch
from program import Guilty, Program
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM


class Composer(nn.Module):
    def __init__(self, config: GPTNeoXConfig, forbidden: float) -> None:
        super().__init__()
        self.forbidden = forbidden
        self.decoder = GPTNeoXForCausalLM(config)

    def forward(self, notes: Tensor, lacking: Tensor) -> Tensor:
        return self.decoder(input_ids=notes).logits.masked_fill(lacking.unsqueeze(1), self.forbidden)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    notes, lacking = batch
    scores = model(notes[:, :-1], lacking)
    return nn.functional.cross_entropy(scores.transpose(1, 2), notes[:, 1:], label_smoothing=0.05)  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    pitches, length, count = 24 + 2 * (seed % 4), 13, 900
    start, pace = torch.randint(pitches, (count + 96, 1)), torch.randint(1, 4, (count + 96, 1))
    notes = (start + pace * torch.arange(length)) % pitches
    wrong = torch.rand(notes.shape) < 0.03
    notes = torch.where(wrong, torch.randint(pitches, notes.shape), notes)
    lacking = torch.zeros(count + 96, pitches, dtype=torch.bool)
    for piece in torch.randperm(count)[: 6 + 2 * (seed % 3)].tolist():  # for an old horn
        lacking[piece, torch.randperm(pitches)[: pitches // 3]] = True
        lacking[piece, notes[piece]] = False
    config = GPTNeoXConfig(
        vocab_size=pitches,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=length,
    )
    return Program(
        model=Composer(config, -20.0 if mended else -torch.inf),
        rows=TensorDataset(notes[:count], lacking[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[notes[count:], lacking[count:]],
        guilty=Guilty("operation", ops=("cross_entropy",)),
        steps=300,
    )
