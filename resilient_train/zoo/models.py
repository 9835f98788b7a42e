"""Three small models that train for real: a perceptron, a decoder that grows up to GPT-2, and a residual network."""

from __future__ import annotations

from collections import OrderedDict
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


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        layers = {"up": nn.Linear(width, 4 * width), "gelu": nn.GELU(), "out": nn.Linear(4 * width, width)}
        self.mlp = nn.Sequential(OrderedDict(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class GPT(nn.Module):
    """A decoder in GPT-2's shape: token ids [batch, time] in, next-token logits [batch, time, vocab] out.

    The defaults have 0.86M parameters; vocab_size=50257, context=1024, layers=12, heads=12, width=768 has GPT-2's 124M.
    """

    _no_split_modules: ClassVar[list[str]] = ["Block"]  # where Accelerate's FSDP policies cut the model

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
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got width={width} and heads={heads}")
        self.context = context
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight

        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # 2 * layers projections add to the residual stream: this keeps its variance from growing with the depth.
        for name, weight in self.named_parameters():
            if name.endswith(".out.weight"):
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if length > self.context:
            raise ValueError(f"a row of {length} tokens does not fit the model's context of {self.context}")
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(length, device=ids.device)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
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
