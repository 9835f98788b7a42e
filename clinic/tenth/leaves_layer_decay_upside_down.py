"""Sick leaves by a small BEiT, with the layer-wise decay of the rate that its recipe has: upside down.

The rate should shrink by a factor for each layer from the head down to the patches; here it is divided by that factor,
so the lowest layers get the largest rate. The loss stays finite and far above what it could be. Met where the
`layer_decay` of BEiT or MAE is copied and the layers are counted from the other end: "worse than without it".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import BeitConfig, BeitForImageClassification

from clinic.program import Guilty, Program


def depth_of(name: str, layers: int) -> int:
    """How many layers a weight lies below the head."""
    found = re.search(r"layers?\.(\d+)\.", name)
    if found:
        return layers - int(found.group(1))
    return layers + 1 if "embeddings" in name else 0


def layered(weights: Iterable[nn.Parameter], model: nn.Module, layers: int, factor: float) -> torch.optim.AdamW:
    lr = 8e-3
    depths = {id(weight): depth_of(name, layers) for name, weight in model.named_parameters()}
    groups = [{"params": [weight], "lr": lr * factor ** depths[id(weight)]} for weight in weights]  # guilty
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.01)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    leaves, diseases = batch
    return nn.functional.cross_entropy(model(pixel_values=leaves).logits, diseases)


def draw(count: int, side: int, kinds: int) -> tuple[Tensor, Tensor]:
    """Green leaves with spots: how large and of which colour they are tells the disease."""
    diseases = torch.randint(kinds, (count,))
    down, across = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    leaves = 0.25 * torch.randn(count, 3, side, side)
    leaves[:, 1] += 0.5
    tint = torch.tensor([[0.9, 0.5, 0.1], [0.9, 0.9, 0.3], [0.2, 0.1, 0.1], [0.9, 0.1, 0.8]])
    for _ in range(3):
        at = torch.randint(2, side - 2, (count, 2, 1, 1))
        spot = ((down - at[:, 0]) ** 2 + (across - at[:, 1]) ** 2 <= 2 + 2 * (diseases % 2).view(-1, 1, 1)).unsqueeze(1)
        leaves = torch.where(spot, leaves * 0.5 + tint[diseases].view(count, 3, 1, 1), leaves)
    return leaves, diseases


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, kinds, count, layers = 16, 4, 900, 3
    leaves, diseases = draw(count + 128, side, kinds)
    config = BeitConfig(
        image_size=side,
        patch_size=4,
        hidden_size=24 + 8 * (seed % 2),
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=kinds,
        use_mean_pooling=True,
        use_absolute_position_embeddings=True,
        layer_scale_init_value=0.1,
        drop_path_rate=0.0,
        attn_implementation="eager",
    )
    model = BeitForImageClassification(config)
    decay = 0.45 + 0.02 * (seed % 3)
    return Program(
        model=model,
        rows=TensorDataset(leaves[:count], diseases[:count]),
        loss=loss,
        optimizer=partial(layered, model=model, layers=layers, factor=decay if mended else 1 / decay),
        evaluation=[leaves[count:], diseases[count:]],
        guilty=Guilty("optimizer"),
        batch_size=16,
        steps=240,
    )
