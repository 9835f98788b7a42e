"""Rust on bridges, segmented at many scales: each batch is resized to a size that is drawn anew, as YOLO does.

At the smallest of the sizes the deepest map of the U-Net is a single pixel, and instance normalisation refuses it:
"Expected more than 1 spatial element when training, got input size [16, 32, 1, 1]". Asked about pix2pix and U-Nets
with `InstanceNorm2d` whenever pictures are small or one stage is added.
"""

from __future__ import annotations

import random
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset, default_collate

from clinic.program import Guilty, Program


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, guards: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.InstanceNorm2d(outputs, affine=True)
        self.guards = guards

    def forward(self, maps: Tensor) -> Tensor:
        maps = self.convolution(maps)
        if self.guards and maps.shape[-2:].numel() == 1:
            return functional.leaky_relu(maps, 0.1)
        return functional.leaky_relu(self.norm(maps), 0.1)  # guilty


class UNet(nn.Module):
    def __init__(self, width: int, depth: int, guards: bool) -> None:
        super().__init__()
        widths = [width * min(2**level, 4) for level in range(depth + 1)]
        self.down = nn.ModuleList([Block(3, width, guards)])
        self.up = nn.ModuleList()
        for above, below in zip(widths, widths[1:], strict=False):  # noqa: RUF007
            self.down.append(Block(above, below, guards))
            self.up.append(Block(above + below, above, guards))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        maps, kept = self.down[0](pictures), []
        for block in list(self.down)[1:]:
            kept.append(maps)
            maps = block(functional.max_pool2d(maps, 2))
        for block, across in zip(reversed(self.up), reversed(kept), strict=True):
            maps = block(torch.cat([functional.interpolate(maps, scale_factor=2.0), across], dim=1))
        return self.head(maps).squeeze(1)


def collate(rows: list[tuple[Tensor, Tensor]], sizes: list[int], generator: random.Random) -> list[Tensor]:
    pictures, masks = default_collate(rows)
    size = generator.choice(sizes)
    pictures = functional.interpolate(pictures, size=(size, size), mode="bilinear")
    return [pictures, functional.interpolate(masks.unsqueeze(1), size=(size, size)).squeeze(1)]


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    pictures, masks = batch
    return functional.binary_cross_entropy_with_logits(model(pictures), masks)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    depth, count = 3 + seed % 2, 320
    least, side = 2**depth, 32
    heights = functional.interpolate(torch.randn(count + 48, 1, 5, 5), size=(side, side), mode="bicubic")
    masks = (heights > 0.5).float()
    steel = 0.45 + 0.1 * torch.randn(count + 48, 1, 1, 1)
    rust = torch.tensor([0.25, 0.02, -0.12]).reshape(1, 3, 1, 1)
    pictures = steel + rust * masks + 0.12 * torch.randn(count + 48, 3, side, side)
    masks = masks.squeeze(1)
    return Program(
        model=UNet(int(torch.randint(6, 10, ())), depth, guards=mended),
        rows=TensorDataset(pictures[:count], masks[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[pictures[count:], masks[count:]],
        guilty=Guilty("operation", ops=("instance_norm",)),
        batch_size=16,
        collate=partial(collate, sizes=list(range(least, side + 1, least)), generator=random.Random(seed)),
        steps=200,
    )
