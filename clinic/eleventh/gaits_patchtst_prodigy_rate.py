"""Prodigy finds its rate itself and wants `lr=1.0`; after the change back to AdamW the one is still there.

D-Adaptation and Prodigy are told to be used with a rate of one, and fine-tuning scripts keep optimizer and rate in two
places. A patch time series transformer (PatchTST) is to tell how somebody walks from an accelerometer.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import PatchTSTConfig, PatchTSTForClassification

from clinic.program import Guilty, Program

PRODIGY_RATE, ADAMW_RATE = 1.0, 2e-3


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    movement, gait = batch
    return nn.functional.cross_entropy(model(past_values=movement).prediction_logits, gait)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    gaits, length, axes = int(torch.randint(4, 7, ())), 48, 2
    rows, held_out = int(torch.randint(700, 1000, ())), 160
    gait = torch.randint(gaits, (rows + held_out,))
    time = torch.arange(length).view(1, -1, 1)
    pace = torch.linspace(0.25, 0.9, gaits)[gait].view(-1, 1, 1) + 0.02 * torch.randn(rows + held_out, 1, 1)
    sway = torch.rand(gaits, axes)[gait].unsqueeze(1)
    phase = 2 * math.pi * torch.rand(rows + held_out, 1, axes)
    movement = torch.sin(pace * time + phase) + sway * torch.sin(2 * pace * time + 2 * phase)
    movement = movement + 0.5 * torch.randn(rows + held_out, length, axes)
    config = PatchTSTConfig(
        num_input_channels=axes,
        num_targets=gaits,
        context_length=length,
        patch_length=8,
        patch_stride=8,
        d_model=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        head_dropout=0.0,
        use_cls_token=True,
    )
    rate = ADAMW_RATE if mended else PRODIGY_RATE  # guilty
    return Program(
        model=PatchTSTForClassification(config),
        rows=TensorDataset(movement[:rows], gait[:rows]),
        loss=loss,
        batch_size=24,
        optimizer=partial(torch.optim.AdamW, lr=rate, weight_decay=0.01),
        evaluation=[movement[rows:], gait[rows:]],
        guilty=Guilty("explosion"),
        steps=240,
    )
