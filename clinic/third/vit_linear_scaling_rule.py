"""The rule that the rate grows with the size of the batch, of which somebody forgot to divide by the size it begins at.

A vision transformer by AdamW: the script multiplies the rate by the batch and the number of workers. The loss
sits at the logarithm of the number of classes for a hundred steps, and learns little from then on.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import ViTConfig, ViTForImageClassification

from clinic.program import Guilty, Program

BASE_RATE, BASE_BATCH, WORKERS = 5e-4, 64, 8


def scaled_rate(batch_size: int, mended: bool) -> float:
    if mended:
        return BASE_RATE * batch_size * WORKERS / BASE_BATCH
    return BASE_RATE * batch_size * WORKERS  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    pixels, label = batch
    return nn.functional.cross_entropy(model(pixel_values=pixels).logits, label)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    classes, size = int(torch.randint(8, 11, ())), 16
    rows, held_out = int(torch.randint(800, 1200, ())), 128
    label = torch.randint(classes, (rows + held_out,))
    turn = (math.pi * label / classes).view(-1, 1, 1)
    grid = torch.arange(size).float()
    along = grid[:, None] * turn.cos() + grid[None, :] * turn.sin()
    stripes = torch.sin(1.2 * along + 6.28 * torch.rand(rows + held_out, 1, 1))
    pixels = stripes.unsqueeze(1).repeat(1, 3, 1, 1) + 0.5 * torch.randn(rows + held_out, 3, size, size)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=size,
        patch_size=4,
        num_labels=classes,
    )
    return Program(
        model=ViTForImageClassification(config),
        rows=TensorDataset(pixels[:rows], label[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=scaled_rate(32, mended), weight_decay=0.05),
        evaluation=[pixels[rows:], label[rows:]],
        guilty=Guilty("explosion"),
        steps=180,
    )
