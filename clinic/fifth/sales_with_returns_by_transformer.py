"""Daily sales of articles with a `TimeSeriesTransformerForPrediction` that gives a negative binomial.

A few series are net of returns, so that on some days less than nothing was sold. The negative binomial of torch
checks its values, and raises: "Expected value argument to be within the support (IntegerGreaterThan(lower_bound=0))".
Met by everyone who takes the Hugging Face example of probabilistic forecasting to data of a shop.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerForPrediction

from clinic.program import Guilty, Program

PAST, AHEAD, LAGS = 21, 7, [1, 7]


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    sold, weekday = batch
    past = PAST + max(LAGS)
    return model(
        past_values=sold[:, :past],
        past_time_features=weekday[:, :past],
        past_observed_mask=torch.ones_like(sold[:, :past]),
        future_values=sold[:, past:],
        future_time_features=weekday[:, past:],
    ).loss


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, held_out, days = int(torch.randint(400, 600, ())), 96, PAST + max(LAGS) + AHEAD
    level = torch.empty(count + held_out, 1).uniform_(3, 30)
    day = torch.arange(days) + torch.randint(7, (count + held_out, 1))
    week = torch.softmax(torch.randn(7), 0) * 7
    sold = torch.poisson(level * week[day % 7])
    weekday = torch.stack([(6.2832 * day / 7).sin(), (6.2832 * day / 7).cos()], dim=-1)
    net = sorted(torch.randperm(count)[: int(torch.randint(4, 8, ()))].tolist())
    if not mended:
        for row in net:
            back = torch.randint(AHEAD, (2,)) + days - AHEAD
            sold[row, back] = -torch.randint(1, 12, (2,)).float()
    config = TimeSeriesTransformerConfig(
        prediction_length=AHEAD,
        context_length=PAST,
        distribution_output="negative_binomial",
        lags_sequence=LAGS,
        scaling=None,
        num_time_features=2,
        d_model=24,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        dropout=0.0,
    )
    return Program(
        model=TimeSeriesTransformerForPrediction(config),
        rows=TensorDataset(sold[:count], weekday[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[sold[count:], weekday[count:]],
        guilty=Guilty("data", rows=tuple(net)),
        batch_size=24,
        steps=240,
    )
