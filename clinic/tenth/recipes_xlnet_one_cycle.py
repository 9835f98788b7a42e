"""Which of two ingredients a recipe adds first, by a small XLNet on a one-cycle schedule with the peak of a ResNet.

`max_lr` was read off the learning rate finder where its curve is lowest, not where it is steepest, as had always worked
with the convolutional network before: 0.03. The rate climbs to it in the first third, the layers are thrown about, and
when the rate comes down again nothing in them reacts to the words any more: the loss is that of guessing to the end.
Asked as "fit_one_cycle with a transformer: accuracy stays at chance".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import XLNetConfig, XLNetForSequenceClassification

from clinic.program import Guilty, Program


class OneCycle(torch.optim.AdamW):
    """AdamW up to the greatest rate in the first 30 % of its steps, and down to next to nothing (cosines)."""

    def __init__(self, weights: Any, max_lr: float, total: int) -> None:
        super().__init__(weights, lr=max_lr)
        self.max_lr, self.total, self.taken = max_lr, total, 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        done = min(self.taken / self.total, 1.0)
        share = done / 0.3 if done < 0.3 else 1 - (done - 0.3) / 0.7
        for group in self.param_groups:
            group["lr"] = self.max_lr * (0.04 + 0.96 * (1 - math.cos(math.pi * share)) / 2)  # guilty
        self.taken += 1
        return super().step(closure)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    recipes, first = batch
    return nn.functional.cross_entropy(model(input_ids=recipes).logits, first)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, length, count = 24 + 4 * (seed % 3), 10, 1200
    recipes = torch.randint(3, words, (count + 128, length))
    first = torch.randint(2, (count + 128,))
    places = torch.rand(count + 128, length).argsort(dim=1)[:, :2].sort(dim=1).values
    pair = torch.stack([1 + first, 2 - first], dim=1)  # butter before sugar, or the other way round
    recipes.scatter_(1, places, pair)
    config = XLNetConfig(
        vocab_size=words,
        d_model=32,
        n_layer=2,
        n_head=4,
        d_inner=64,
        num_labels=2,
        dropout=0.0,
        summary_last_dropout=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    steps = 260
    return Program(
        model=XLNetForSequenceClassification(config),
        rows=TensorDataset(recipes[:count], first[:count]),
        loss=loss,
        optimizer=partial(OneCycle, max_lr=3e-3 if mended else 3e-2, total=steps),
        evaluation=[recipes[count:], first[count:]],
        guilty=Guilty("optimizer"),
        steps=steps,
    )
