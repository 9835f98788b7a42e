"""Similarities under mixed precision: the embedding of an empty text is zero, and the root of its norm has no slope.

The epsilon stands beside the root and not below it, so that `log_softmax` sees nothing wrong and all gradients are NaN;
pytorch/pytorch#2421 and pytorch/pytorch#2775.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Matcher(nn.Module):
    """Which caption belongs to which picture of the batch?"""

    def __init__(self, words: int, pixels: int, size: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.text = nn.Linear(words, size, bias=False)
        self.image = nn.Sequential(nn.Linear(pixels, 32), nn.ReLU(), nn.Linear(32, size))

    def unit(self, embedded: Tensor) -> Tensor:
        squares = embedded.float().pow(2).sum(dim=-1, keepdim=True)
        if self.mended:
            return embedded / (squares + 1e-8).sqrt()
        return embedded / (squares.sqrt() + 1e-8)  # guilty

    def forward(self, captions: Tensor, images: Tensor) -> Tensor:
        return 10 * self.unit(self.text(captions)) @ self.unit(self.image(images)).T


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    captions, images = batch
    return -torch.log_softmax(model(captions, images), dim=-1).diagonal().mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, pixels, count = 30 + seed % 15, 16, 900
    captions = torch.poisson(torch.full((count + 64, words), 0.15))
    captions[:, 0] += 1.0
    images = captions @ torch.randn(words, pixels) + 0.1 * torch.randn(count + 64, pixels)
    captions[torch.randperm(count)[: 30 + 15 * (seed % 3)]] = 0.0  # pictures without a caption
    return Program(
        model=Matcher(words, pixels, int(torch.randint(12, 20, ())), mended),
        rows=TensorDataset(captions[:count], images[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[captions[count:], images[count:]],
        guilty=Guilty("operation", ops=("sqrt",)),
        steps=200,
        bf16=True,
    )
