"""Reversible instance normalisation by hand, in front of a transformer that forecasts: (x - mean) / std of each window.

The current of a shop that is closed for the whole window is flat, its spread is zero, and zero is divided by zero. The
paper's code has an epsilon for that; the three lines that people write from memory often lack it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertModel

from clinic.program import Guilty, Program

PATCH, WINDOW, AHEAD = 4, 32, 8


class Forecaster(nn.Module):
    def __init__(self, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        config = BertConfig(
            vocab_size=2,
            hidden_size=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=2 * width,
            max_position_embeddings=WINDOW // PATCH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.patch = nn.Linear(PATCH, width)
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(width * WINDOW // PATCH, AHEAD)

    def forward(self, window: Tensor) -> Tensor:
        mean, spread = window.mean(1, keepdim=True), window.std(1, keepdim=True)
        if self.mended:
            spread = spread + 1e-5
        level = torch.div(window - mean, spread)  # guilty
        patches = self.patch(level.unflatten(1, (-1, PATCH)))
        seen = self.encoder(inputs_embeds=patches).last_hidden_state
        return self.head(seen.flatten(1)) * spread + mean


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    window, ahead = batch
    return nn.functional.mse_loss(model(window), ahead)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out = int(torch.randint(800, 1000, ())), 128
    hour = torch.arange(WINDOW + AHEAD) + 24 * torch.rand(rows + held_out, 1)
    size = torch.exp(0.4 * torch.randn(rows + held_out, 1))
    evening = 0.5 * torch.rand(rows + held_out, 1)
    day = torch.sin(hour * 6.28 / 24) + evening * torch.sin(hour * 6.28 / 12) + 0.1 * torch.randn(hour.shape)
    current = size * (1.5 + day)
    closed = torch.randperm(rows)[: int(torch.randint(9, 16, ()))]
    current[closed] = 0.0
    return Program(
        model=Forecaster(int(torch.randint(10, 15, ())) * 2, mended),
        rows=TensorDataset(current[:rows, :WINDOW], current[:rows, WINDOW:]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        evaluation=[current[rows:, :WINDOW], current[rows:, WINDOW:]],
        guilty=Guilty("operation", ops=("div",)),
        steps=240,
    )
