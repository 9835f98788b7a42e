"""The rate's warm-up is `(step + 1) / warm` with no `min(1, ...)`: it goes on for ever, past the rate that was meant.

The loss falls through the warm-up, as it should, and rises again some time later. A slip in hand-written
`LambdaLR` schedules, found on forums under "loss goes up again after warm-up, GPT from scratch".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from clinic.program import Guilty, Program


class Warmed(torch.optim.AdamW):
    """AdamW whose rate begins small."""

    def __init__(self, weights: Any, lr: float, warm: int, ends: bool) -> None:
        super().__init__(weights, lr=lr / warm)
        self.base, self.warm, self.ends, self.done = lr, warm, ends, 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        value = super().step(closure)
        self.done += 1
        share = (self.done + 1) / self.warm
        for group in self.param_groups:
            group["lr"] = self.base * (min(1.0, share) if self.ends else share)  # guilty
        return value


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (lines,) = batch
    return model(input_ids=lines, labels=lines).loss


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, length, count = 28 + seed % 6, 18, 800
    follow = torch.rand(words, words).pow(25)
    lines = torch.randint(words, (count + 96, 2))
    for _ in range(length - 1):
        lines = torch.cat([lines, torch.multinomial(follow[lines[:, -2]], 1)], dim=-1)
    config = GPTNeoXConfig(
        vocab_size=words,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=length + 1,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Program(
        model=GPTNeoXForCausalLM(config),
        rows=TensorDataset(lines[:count]),
        loss=loss,
        optimizer=partial(Warmed, lr=5e-3, warm=8 + 2 * (seed % 3), ends=mended),
        evaluation=[lines[count:]],
        guilty=Guilty("explosion"),
        batch_size=16,
        steps=350,
    )
