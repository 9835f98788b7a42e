"""A Swin transformer is trained from scratch with the learning rate of the ResNet that it took the place of.

Nothing is NaN; the loss falls to what guessing reaches, and stays there. Asked as "Swin stuck at chance on my data
while ResNet gets 90 %".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import SwinConfig, SwinForImageClassification

from clinic.program import Guilty, Program


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(pixel_values=images).logits, labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, classes, count = 16, 4, 640
    labels = torch.randint(classes, (count + 96,))
    angle = (torch.pi / classes * labels)[:, None, None] + 0.1 * torch.randn(count + 96, 1, 1)
    grid = torch.arange(side)
    along = angle.cos() * grid[None, None, :] + angle.sin() * grid[None, :, None]
    gills = torch.sin((1.2 + 0.2 * (seed % 3)) * along + 6.28 * torch.rand(count + 96, 1, 1))
    images = gills.unsqueeze(1) * torch.rand(count + 96, 3, 1, 1) + 0.3 * torch.randn(count + 96, 3, side, side)
    config = SwinConfig(
        image_size=side,
        patch_size=2,
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        mlp_ratio=2.0,
        drop_path_rate=0.0,
        num_labels=classes,
    )
    return Program(
        model=SwinForImageClassification(config),
        rows=TensorDataset(images[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3 if mended else 0.1),
        evaluation=[images[count:], labels[count:]],
        guilty=Guilty("explosion"),
        batch_size=16,
        steps=240,
    )
