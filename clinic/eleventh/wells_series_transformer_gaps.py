"""A time series transformer gets the gaps of a series as they are, with a mask of what was observed.

The documentation of `past_observed_mask` says that gaps are to be filled with zeros first; with NaN in their place the
mask is multiplied, NaN times zero is NaN, and so are scale and loss. "TimeSeriesTransformer loss is nan", in the forum.
Water levels of wells, a few of whose gauges were out for some hours.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerForPrediction

from clinic.program import Guilty, Program

PAST, FUTURE, LAGS = 16, 6, [1, 2, 4]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    wells, held_out = int(torch.randint(500, 700, ())), 128
    whole = PAST + max(LAGS) + FUTURE
    time = torch.arange(whole)
    phase, pace = 6.28 * torch.rand(wells + held_out, 1), 2 * math.pi / (6 + 4 * torch.rand(wells + held_out, 1))
    level = 3 + torch.sin(pace * time + phase) + 0.1 * torch.randn(wells + held_out, whole)
    past, future = level[:, :-FUTURE], level[:, -FUTURE:]
    observed = torch.ones_like(past)
    gaps = torch.randperm(wells)[: 3 + seed % 3].sort().values.tolist()
    for well in gaps:
        begin, hours = int(torch.randint(2, 12, ())), int(torch.randint(1, 5, ()))
        past[well, begin : begin + hours] = 0.0 if mended else math.nan
        observed[well, begin : begin + hours] = 0.0
    clock = (time % 24 / 24).view(1, -1, 1).repeat(wells + held_out, 1, 1)
    columns = {
        "past_values": past,
        "past_time_features": clock[:, :-FUTURE],
        "past_observed_mask": observed,
        "future_values": future,
        "future_time_features": clock[:, -FUTURE:],
    }
    config = TimeSeriesTransformerConfig(
        prediction_length=FUTURE,
        context_length=PAST,
        distribution_output="normal",
        lags_sequence=LAGS,
        num_time_features=1,
        d_model=24,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
    )
    return Program(
        model=TimeSeriesTransformerForPrediction(config),
        rows=[{name: column[well] for name, column in columns.items()} for well in range(wells)],
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation={name: column[wells:] for name, column in columns.items()},
        guilty=Guilty("data", rows=tuple(gaps)),
        steps=240,
    )
