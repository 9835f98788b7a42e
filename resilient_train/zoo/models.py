"""Three small models that train for real: a perceptron, a decoder that grows up to GPT-2, and a residual network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU between them, over rows of any shape."""

    def __init__(
        self, in_features: int = 64, hidden: Sequence[int] = (128, 128), out_features: int = 10, dropout: float = 0.0
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = in_features
        for wider in hidden:
            layers += [nn.Linear(width, wider), nn.ReLU(), nn.Dropout(dropout)]
            width = wider
        self.layers = nn.Sequential(*layers, nn.Linear(width, out_features))

    def forward(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.layers(rows.flatten(1))
        return logits


class GPT(nn.Module):
    """A decoder in GPT-2's shape: token ids [batch, time] in, next-token logits [batch, time, vocab] out.

    The defaults have 0.86M parameters; vocab_size=50257, context=1024, layers=12, heads=12, width=768 has GPT-2's 124M.
    """

    _no_split_modules: ClassVar[list[str]] = ["TransformerEncoderLayer"]  # where Accelerate's FSDP policies cut it

    def __init__(
        self,
        vocab_size: int = 256,
        context: int = 256,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight

        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                # 2 * layers projections add to the residual stream: its variance shall not grow with the depth.
                adds = name.endswith(("out_proj.weight", "linear2.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5 if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if length > self.context:
            raise ValueError(f"a row of {length} tokens does not fit the model's context of {self.context}")
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(length, device=ids.device)))
        is_ahead = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        logits: Tensor = self.head(self.blocks(x, mask=is_ahead, is_causal=True))
        return logits


class BasicBlock(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        nn.init.zeros_(self.norm2.weight)  # every block begins as its shortcut, so depth costs nothing at the start

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """The CIFAR form of a residual network: a 3x3 stem and three stages of basic blocks, for images from 4x4 up."""

    def __init__(self, in_channels: int = 1, classes: int = 10, width: int = 16, depth: int = 20) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 6)
        if blocks < 1 or rest:
            raise ValueError(f"depth must be 6n+2 (8, 14, 20, 32, 44, 56, ...), got {depth}")
        stem = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.stem = nn.Sequential(stem, nn.BatchNorm2d(width), nn.ReLU())
        stages: list[nn.Module] = []
        channels = width
        for wider in (width, 2 * width, 4 * width):
            for _ in range(blocks):
                stages.append(BasicBlock(channels, wider, stride=wider // channels))
                channels = wider
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(self.stem(images)).mean((2, 3)))
        return logits
