"""Land cover from satellite tiles of four bands: a SegFormer takes the place of a fully convolutional network.

The config of the network before said SGD at 0.1. The type of the optimizer was changed to AdamW with the model, the
rate was not. Attention and norms are thrown about from the first steps, and most pixels get the commonest class.
Issues of the common segmentation toolboxes ask again and again why a transformer stays far below its published score.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import SegformerConfig, SegformerForSemanticSegmentation

from clinic.program import Guilty, Program

SIZE, BANDS, CLASSES = 32, 4, 5


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    tile, cover = batch
    return model(pixel_values=tile, labels=cover).loss


def tiles(count: int, colours: Tensor) -> tuple[Tensor, Tensor]:
    """Fields around random centres. Two classes have the same colour, and differ in the stripes of their rows."""
    grid = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"), -1).float()
    centres = SIZE * torch.rand(count, 6, 2)
    kinds = torch.multinomial(torch.tensor([0.4, 0.15, 0.15, 0.15, 0.15]), count * 6, replacement=True).view(count, 6)
    nearest = torch.cdist(grid.view(1, -1, 2), centres).argmin(-1)
    cover = kinds.gather(1, nearest).view(count, SIZE, SIZE)
    tile = colours[cover].permute(0, 3, 1, 2)
    stripes = (grid.sum(-1) * torch.pi / 2).sin() * (cover == CLASSES - 1)
    light = 0.7 + 0.6 * torch.rand(count, 1, 1, 1)
    return tile * light + 0.6 * stripes.unsqueeze(1) + 0.3 * torch.randn(tile.shape), cover


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    colours = torch.randn(CLASSES, BANDS)
    colours[-1] = colours[-2]
    count = int(torch.randint(500, 700, ()))
    tile, cover = tiles(count + 64, colours)
    config = SegformerConfig(
        num_channels=BANDS,
        num_encoder_blocks=3,
        depths=[1, 1, 1],
        sr_ratios=[4, 2, 1],
        hidden_sizes=[16, 32, 48],
        patch_sizes=[7, 3, 3],
        strides=[2, 2, 2],
        num_attention_heads=[1, 2, 3],
        mlp_ratios=[2, 2, 2],
        decoder_hidden_size=int(torch.randint(4, 7, ())) * 8,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        num_labels=CLASSES,
    )
    return Program(
        model=SegformerForSemanticSegmentation(config),
        rows=TensorDataset(tile[:count], cover[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3 if mended else 0.1, weight_decay=0.01),
        evaluation=[tile[count:], cover[count:]],
        guilty=Guilty("explosion"),
        batch_size=12,
        steps=280,
    )
