"""RMS norm without an epsilon over the embeddings of a padded sentence: padding is zero, and `rsqrt(0)` infinite.

deepspeedai/DeepSpeed#581 and huggingface/diffusers#13316 lose their epsilon to half precision, to the same end.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class RMSNorm(nn.Module):
    def __init__(self, size: int, mended: bool) -> None:
        super().__init__()
        self.epsilon = 1e-6 if mended else 0.0
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, inputs: Tensor) -> Tensor:
        power = inputs.pow(2).mean(dim=-1, keepdim=True)
        return self.weight * inputs * torch.rsqrt(power + self.epsilon)  # guilty


class SentenceModel(nn.Module):
    def __init__(self, words: int, size: int, mended: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, size, padding_idx=0)
        self.block = nn.Sequential(RMSNorm(size, mended), nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, 1))

    def forward(self, words: Tensor) -> Tensor:
        present = (words != 0).float()
        values = self.block(self.embedding(words)).squeeze(-1)
        return (values * present).sum(dim=-1) / present.sum(dim=-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    words, ratings = batch
    return nn.functional.mse_loss(model(words), ratings)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, longest, vocabulary = 800, 10, 50 + seed % 20
    words = torch.randint(1, vocabulary, (count + 64, longest))
    words[torch.arange(longest) >= torch.randint(1, longest + 1, (count + 64, 1))] = 0
    worth = torch.randn(vocabulary)
    present = (words != 0).float()
    ratings = 2 * (worth[words] * present).sum(dim=-1) / present.sum(dim=-1)
    return Program(
        model=SentenceModel(vocabulary, int(torch.randint(12, 24, ())), mended),
        rows=TensorDataset(words[:count], ratings[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        evaluation=[words[count:], ratings[count:]],
        guilty=Guilty("operation", ops=("rsqrt", "mul")),
        steps=200,
    )
