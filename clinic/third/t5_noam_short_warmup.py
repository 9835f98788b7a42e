"""The schedule of "Attention is all you need", in a small model with a short warm-up: its peak is far too high.

The rate of that schedule is the width and the length of the warm-up to the power of -1/2. For 512 and 4000 steps this
is 0.0007; for a small T5 with a warm-up of some dozens of steps it is a hundred times more, and it decays slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import T5Config, T5ForConditionalGeneration

from clinic.program import Guilty, Program


class Noam(torch.optim.Adam):
    """Adam with warm-up and then the inverse root of the step."""

    def __init__(self, weights: Any, width: int, warmup: int, factor: float) -> None:
        super().__init__(weights, lr=0.0, betas=(0.9, 0.98), eps=1e-9)
        self.width, self.warmup, self.factor, self.done = width, warmup, factor, 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self.done += 1
        for group in self.param_groups:
            group["lr"] = (
                self.factor * self.width**-0.5 * min(self.done**-0.5, self.done * self.warmup**-1.5)  # guilty
            )
        return super().step(closure)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    tickets, titles = batch
    return model(input_ids=tickets, labels=titles).loss


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    values, words, width = int(torch.randint(4, 6, ())), 64, 32
    rows, held_out, chatter = int(torch.randint(800, 1200, ())), 96, int(torch.randint(2, 6, ()))
    ticket = values * torch.arange(4) + torch.randint(values, (rows + held_out, 4))  # topic, product, country, haste
    noise = torch.randint(44, words, (rows + held_out, chatter))
    shuffled = torch.rand(rows + held_out, 8 + chatter).argsort(-1)
    tickets = torch.cat([2 + ticket, 2 + ticket, noise], dim=-1).gather(1, shuffled)
    titles = 22 + ticket
    config = T5Config(
        vocab_size=words,
        d_model=width,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    warmup = int(torch.randint(15, 30, ()))
    return Program(
        model=T5ForConditionalGeneration(config),
        rows=TensorDataset(tickets[:rows], titles[:rows]),
        loss=loss,
        optimizer=partial(Noam, width=width, warmup=warmup, factor=0.25 if mended else 8.0),
        evaluation=[tickets[rows:], titles[rows:]],
        guilty=Guilty("explosion"),
        steps=220,
    )
