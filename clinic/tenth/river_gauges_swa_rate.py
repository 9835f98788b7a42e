"""The level of a river in the next hours by a small PatchTST, trained to its end at the rate of weight averaging.

The loop came with `SWALR(optimizer, swa_lr=0.05)`, the number in PyTorch's own example, which is meant for SGD. Here
the optimizer is AdamW at a thousandth: all goes well until the averaging begins, then the rate rises to fifty times
what it was, the loss jumps to that of a constant guess and stays there. Asked as "loss goes up as soon as SWA starts".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import PatchTSTConfig, PatchTSTForPrediction

from clinic.program import Guilty, Program


class Averaged(torch.optim.AdamW):
    """AdamW that goes over to the rate of stochastic weight averaging, within some steps, as SWALR does."""

    def __init__(self, weights: Any, lr: float, swa_lr: float, begin: int, anneal: int = 10) -> None:
        super().__init__(weights, lr=lr)
        self.base, self.swa_lr, self.begin, self.anneal, self.taken = lr, swa_lr, begin, anneal, 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        done = min(max((self.taken - self.begin) / self.anneal, 0.0), 1.0)
        share = (1 - math.cos(math.pi * done)) / 2
        for group in self.param_groups:
            group["lr"] = share * self.swa_lr + (1 - share) * self.base  # guilty
        self.taken += 1
        return super().step(closure)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    past, future = batch
    return nn.functional.smooth_l1_loss(model(past_values=past).prediction_outputs, future)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    gauges, past, ahead, count = 2, 48, 8, 700
    hours = torch.arange(past + ahead)
    tide = torch.rand(count + 96, 1, gauges) * 6.3 + hours.unsqueeze(-1) * (2 * math.pi / 12.4)
    melt = torch.rand(count + 96, 1, 1) * 6.3 + hours.unsqueeze(-1) * (2 * math.pi / 24)
    levels = torch.rand(count + 96, 1, gauges) * tide.sin() + torch.rand(count + 96, 1, gauges) * melt.sin()
    levels = levels + 0.3 * torch.randn(count + 96, 1, gauges) + 0.05 * torch.randn(levels.shape)
    config = PatchTSTConfig(
        num_input_channels=gauges,
        context_length=past,
        prediction_length=ahead,
        patch_length=8,
        patch_stride=8,
        num_hidden_layers=2,
        d_model=32,
        num_attention_heads=4,
        ffn_dim=64,
        norm_type="layernorm",
        attention_dropout=0.0,
        ff_dropout=0.0,
        head_dropout=0.0,
        scaling="std",
    )
    steps = 240
    return Program(
        model=PatchTSTForPrediction(config),
        rows=TensorDataset(levels[:count, :past], levels[:count, past:]),
        loss=loss,
        optimizer=partial(Averaged, lr=1e-3, swa_lr=5e-4 if mended else 0.05, begin=150 + 10 * (seed % 4)),
        evaluation=[levels[count:, :past], levels[count:, past:]],
        guilty=Guilty("optimizer"),
        steps=steps,
    )
