"""Which desk a headline belongs to, by a small XLNet, under a rate that goes up and down in triangles.

The cycle came with the convolutional network before it, which was trained by SGD between 0.001 and 0.1. Only the
optimizer was changed. At the foot of a triangle AdamW does learn, at its top everything is thrown away again; the loss
stays finite, close to that of guessing. Asked as "CyclicLR: the loss saws up and down and gets nowhere".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import XLNetConfig, XLNetForSequenceClassification

from clinic.program import Guilty, Program


class Triangles(torch.optim.AdamW):
    """AdamW whose rate rises and falls between two rates."""

    def __init__(self, weights: Any, least: float, most: float, half: int) -> None:
        super().__init__(weights, lr=least)
        self.least, self.most, self.half, self.taken = least, most, half, 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        place = self.taken % (2 * self.half)
        height = min(place, 2 * self.half - place) / self.half
        for group in self.param_groups:
            group["lr"] = self.least + (self.most - self.least) * height
        self.taken += 1
        return super().step(closure)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    headlines, desks = batch
    return nn.functional.cross_entropy(model(input_ids=headlines).logits, desks)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    desks, words, length, count = 4 + seed % 3, 70, 9, 960
    labels = torch.randint(desks, (count + 128,))
    topics = (2.2 * torch.randn(desks, words)).softmax(dim=-1)
    headlines = 1 + torch.multinomial(topics[labels], length - 1)
    headlines = torch.cat([headlines, torch.zeros(count + 128, 1, dtype=torch.long)], dim=1)
    config = XLNetConfig(
        vocab_size=words + 1,
        d_model=32,
        n_layer=2,
        n_head=2,
        d_inner=64,
        dropout=0.0,
        summary_last_dropout=0.0,
        num_labels=desks,
        use_mems_train=False,
    )
    most = 3e-3 if mended else 0.1  # guilty
    return Program(
        model=XLNetForSequenceClassification(config),
        rows=TensorDataset(headlines[:count], labels[:count]),
        loss=loss,
        optimizer=partial(Triangles, least=most / 100, most=most, half=30 + 5 * (seed % 3)),
        evaluation=[headlines[count:], labels[count:]],
        guilty=Guilty("optimizer"),
        batch_size=16,
        steps=240,
    )
