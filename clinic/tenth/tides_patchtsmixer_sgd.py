"""Tides at a few harbours by a PatchTSMixer, trained with SGD at the rate of the harmonic analysis before it.

A least-squares fit of a handful of sines takes a step of 1 with momentum. A mixer with a head of hundreds of inputs
does not: the error grows from the first updates on and is infinite a little later. Asked as "the loss goes to nan with
SGD, but is fine with Adam".
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import PatchTSMixerConfig, PatchTSMixerForPrediction

from clinic.program import Guilty, Program


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    past, future = batch
    forecast = model(past_values=past, return_loss=False).prediction_outputs
    return nn.functional.mse_loss(forecast, future)


def tides(count: int, hours: int, harbours: int) -> Tensor:
    """Two tides of the moon and one of the sun, each harbour with delays of its own, and some wind."""
    begin = 700 * torch.rand(count, 1, 1)
    time = begin + torch.arange(hours).view(1, hours, 1)
    levels = 0.15 * torch.randn(count, hours, harbours)
    for period, height in ((12.42, 1.2), (12.0, 0.5), (25.82, 0.4)):
        delay = 2 * math.pi * torch.rand(harbours)
        levels = levels + height * torch.sin(2 * math.pi * time / period + delay)
    return levels


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    harbours, past, ahead, count = 2 + seed % 3, 48, 12, 900
    levels = tides(count + 128, past + ahead, harbours)
    config = PatchTSMixerConfig(
        context_length=past,
        prediction_length=ahead,
        patch_length=8,
        patch_stride=8,
        num_input_channels=harbours,
        d_model=16 + 8 * (seed % 2),
        num_layers=2,
        expansion_factor=2,
        dropout=0.0,
        head_dropout=0.0,
        scaling=None,
    )
    lr = 0.02 if mended else 1.0 + 0.5 * (seed % 2)
    return Program(
        model=PatchTSMixerForPrediction(config),
        rows=TensorDataset(levels[:count, :past], levels[:count, past:]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=0.9),  # guilty
        evaluation=[levels[count:, :past], levels[count:, past:]],
        guilty=Guilty("explosion"),
        steps=260,
    )
