"""An exponential decay that was meant for the end of each epoch is stepped after every batch: the rate is gone at once.

`scheduler.step()` sits one indentation too deep. Asked as "loss stops falling after a few iterations, whatever the
learning rate"; here a RoFormer that sorts clauses of contracts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import RoFormerConfig, RoFormerForSequenceClassification

from clinic.program import Guilty, Program


class Decayed(torch.optim.AdamW):
    """AdamW whose rate falls by a factor now and then."""

    def __init__(self, weights: Any, lr: float, factor: float, every: int) -> None:
        super().__init__(weights, lr=lr)
        self.factor, self.every, self.taken = factor, every, 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        done = super().step(closure)
        self.taken += 1
        if self.taken % self.every == 0:
            for group in self.param_groups:
                group["lr"] *= self.factor  # guilty
        return done


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    clauses, kinds = batch
    logits = model(input_ids=clauses, attention_mask=torch.ones_like(clauses)).logits
    return nn.functional.cross_entropy(logits, kinds)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, kinds, length, count = 40 + 10 * (seed % 3), 4, 12, 960
    labels = torch.randint(kinds, (count + 128,))
    clauses = torch.randint(kinds + 1, words, (count + 128, length))
    for _ in range(3):
        place = torch.randint(1, length, (count + 128,))
        clauses[torch.arange(count + 128), place] = labels + 1
    clauses[:, 0] = 0
    config = RoFormerConfig(
        vocab_size=words,
        embedding_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=kinds,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    factor = 0.85 + 0.02 * (seed % 3)
    return Program(
        model=RoFormerForSequenceClassification(config),
        rows=TensorDataset(clauses[:count], labels[:count]),
        loss=loss,
        optimizer=partial(Decayed, lr=1e-3, factor=factor, every=count // 32 if mended else 1),
        evaluation=[clauses[count:], labels[count:]],
        guilty=Guilty("optimizer"),
        steps=300,
    )
