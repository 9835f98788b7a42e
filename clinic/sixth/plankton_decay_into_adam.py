"""Which plankton a microscope saw: a small DINOv2 with a head, by Adam in place of AdamW.

The weight decay of the config, 0.3, is what the paper gives for AdamW, which takes it off the weights beside the step.
Adam adds it to the gradient, divides both by their size, and the weights shrink by the whole rate at every step: the
logits stay near zero and the loss near that of guessing. One letter, and a common one in ported configs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import Dinov2Config, Dinov2ForImageClassification

from clinic.program import Guilty, Program

SIZE, KINDS = 20, 6


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    picture, kind = batch
    return model(pixel_values=picture, labels=kind).loss


def plankton(count: int) -> tuple[Tensor, Tensor]:
    """A bright outline with two to seven arms, turned anyhow, among dust."""
    kind = torch.randint(KINDS, (count,))
    grid = torch.arange(SIZE) - (SIZE - 1) / 2
    move, turn = 1.5 * torch.randn(2, count, 1, 1), 2 * torch.pi * torch.rand(count, 1, 1)
    y, x = (grid[:, None] - move[0]).expand(-1, -1, SIZE), (grid - move[1]).expand(-1, SIZE, -1)
    arms = (kind + 1).view(-1, 1, 1)
    radius = 5 + 2 * torch.cos(arms * torch.atan2(y, x) + turn)
    picture = (-(torch.hypot(y, x) - radius).square() / 2).exp()
    picture = picture.unsqueeze(1).expand(-1, 3, -1, -1)
    return picture + 0.15 * torch.randn(picture.shape), kind


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    data, held_out = plankton(int(torch.randint(1500, 2200, ()))), plankton(256)
    config = Dinov2Config(
        image_size=SIZE,
        patch_size=4,
        hidden_size=int(torch.randint(3, 5, ())) * 16,
        num_hidden_layers=3,
        num_attention_heads=4,
        mlp_ratio=2,
        layerscale_value=1.0,
        num_labels=KINDS,
    )
    optimizer = torch.optim.AdamW if mended else torch.optim.Adam
    return Program(
        model=Dinov2ForImageClassification(config),
        rows=TensorDataset(*data),
        loss=loss,
        optimizer=partial(optimizer, lr=1e-3, weight_decay=0.3),
        evaluation=list(held_out),
        guilty=Guilty("optimizer"),
        batch_size=32,
        steps=400,
    )
