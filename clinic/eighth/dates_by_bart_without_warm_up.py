"""A BART from random weights learns to rewrite dates, at full learning rate from the very first step.

Its norms come after the residual sums, and such a model needs a gentle start: the decoder learns how often each digit
occurs and never looks at the encoder. Asked as "seq2seq transformer outputs the same sentence for every input".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import BartConfig, BartForConditionalGeneration

from clinic.program import Guilty, Program


class WarmedUp(torch.optim.Adam):
    """Adam whose rate rises to its peak within some steps."""

    def __init__(self, weights: Any, peak: float, warm_up: int) -> None:
        super().__init__(weights, lr=peak / warm_up)
        self.peak, self.warm_up, self.taken = peak, warm_up, 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self.taken += 1
        for group in self.param_groups:
            group["lr"] = self.peak * min(1.0, self.taken / self.warm_up)
        return super().step(closure)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    written, begun, wanted = batch
    logits = model(input_ids=written, decoder_input_ids=begun, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    digits, length, count = 10, 6, 1600
    written = torch.randint(3, 3 + digits, (count + 128, length))
    order = torch.tensor([4, 5, 2, 3, 0, 1])  # day, month, year become year, month, day
    wanted = written[:, order]
    begun = torch.cat([torch.full((count + 128, 1), 2), wanted[:, :-1]], dim=1)
    width = 32
    config = BartConfig(
        vocab_size=3 + digits,
        d_model=width,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=16,
        dropout=0.0,
        init_std=0.1,
    )
    return Program(
        model=BartForConditionalGeneration(config),
        rows=TensorDataset(written[:count], begun[:count], wanted[:count]),
        loss=loss,
        optimizer=partial(WarmedUp, peak=3e-3 if mended else 0.02, warm_up=60 if mended else 1),
        evaluation=[written[count:], begun[count:], wanted[count:]],
        guilty=Guilty("explosion"),
        steps=300,
    )
