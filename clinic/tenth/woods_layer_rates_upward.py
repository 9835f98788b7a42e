"""Which wood a magnified slice shows, by a BEiT, with a rate for each layer that goes the wrong way from the right one.

BEiT and MAE multiply the rate of the head by 0.65 for each layer on the way down. Here it is counted from the bottom:
the embeddings get the rate that was meant for the head, and each layer above gets its part divided by the decay. Asked
as "layer-wise learning rate decay makes my fine-tuning worse", in issues of the repositories of BEiT and MAE.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import BeitConfig, BeitForImageClassification

from clinic.program import Guilty, Program


def layer_of(name: str, depth: int) -> int:
    """The embeddings are layer 0, the blocks come next, and pooling and head are last."""
    if ".embeddings." in name:
        return 0
    if ".layer." in name:
        return int(name.split(".layer.")[1].split(".")[0]) + 1
    return depth + 1


def layer_wise(
    weights: Iterable[nn.Parameter], layers: list[int], lr: float, decay: float, from_top: bool
) -> torch.optim.AdamW:
    """AdamW with a rate for each layer."""
    top = max(layers)
    members: list[list[nn.Parameter]] = [[] for _ in range(top + 1)]
    for layer, weight in zip(layers, weights, strict=True):
        members[layer].append(weight)
    rates = [lr * decay ** (top - layer) if from_top else lr / decay**layer for layer in range(top + 1)]  # guilty
    groups = [{"params": group, "lr": rate} for group, rate in zip(members, rates, strict=True)]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.01)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    slices, woods = batch
    return nn.functional.cross_entropy(model(pixel_values=slices).logits, woods)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    woods, side, depth, count = 5 + seed % 3, 16, 3 + seed % 2, 800
    total = count + 128
    labels = torch.randint(woods, (total,))
    down, across = torch.meshgrid(torch.arange(float(side)), torch.arange(float(side)), indexing="ij")
    spacing = (0.5 + 1.6 * torch.arange(woods) / woods)[labels].view(-1, 1, 1)
    tilt = 0.6 * torch.rand(total, 1, 1) - 0.3
    rings = torch.sin(spacing * (down + tilt * across) + 6.283 * torch.rand(total, 1, 1))
    slices = (rings + 0.6 * torch.randn(total, side, side)).unsqueeze(1)
    config = BeitConfig(
        image_size=side,
        patch_size=4,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=depth,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
        use_absolute_position_embeddings=True,
        num_labels=woods,
    )
    model = BeitForImageClassification(config)
    layers = [layer_of(name, depth) for name, _ in model.named_parameters()]
    return Program(
        model=model,
        rows=TensorDataset(slices[:count], labels[:count]),
        loss=loss,
        optimizer=partial(layer_wise, layers=layers, lr=8e-3, decay=0.65, from_top=mended),
        evaluation=[slices[count:], labels[count:]],
        guilty=Guilty("optimizer"),
        steps=240,
    )
