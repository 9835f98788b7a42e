"""CosFace over a small ViT, with the logarithm taken of a softmax: at a scale of 64 a probability is soon exactly 0.

Written out as `-torch.log(torch.softmax(s * (cos - m), -1))[label]`, as many ports of ArcFace and CosFace have it; face
sets hold some wrong names, and a wrong name lies more than 88 logits below the right one. "ArcFace loss goes NaN".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import ViTConfig, ViTModel

from clinic.program import Guilty, Program


class Faces(nn.Module):
    """A cosine for each known person."""

    def __init__(self, config: ViTConfig, people: int) -> None:
        super().__init__()
        self.encoder = ViTModel(config, add_pooling_layer=False)
        self.people = nn.Parameter(torch.randn(people, config.hidden_size))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.encoder(pixel_values=images).last_hidden_state.mean(1)
        return nn.functional.normalize(hidden, dim=-1) @ nn.functional.normalize(self.people, dim=-1).T


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    images, labels = batch
    cosines = model(images)
    marked = nn.functional.one_hot(labels, cosines.shape[-1])
    logits = 64 * (cosines - 0.5 * marked)
    if mended:
        return nn.functional.cross_entropy(logits, labels)
    chance = torch.softmax(logits, -1)
    return -(marked * torch.log(chance)).sum(-1).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    people, side, count = 5 + seed % 3, 8, 800
    labels = torch.randint(people, (count + 96,))
    images = torch.randn(people, 1, side, side)[labels] + 0.5 * torch.randn(count + 96, 1, side, side)
    confused = torch.rand(count) < 0.15
    labels[:count][confused] = torch.randint(people, (int(confused.sum()),))
    config = ViTConfig(
        image_size=side,
        patch_size=4,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
    )
    return Program(
        model=Faces(config, people),
        rows=TensorDataset(images[:count], labels[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[images[count:], labels[count:]],
        guilty=Guilty("operation", ops=("log", "softmax")),
        steps=240,
    )
