"""Training with activations of eight bits, scaled by the largest of each token: the embedding of padding is all zero.

127 over zero is infinite, and zero times infinity NaN. Nearly all sentences are as long as they may be, so that the
scheme was tried with success before it met a short one.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class BitLinear(nn.Linear):
    """A linear layer with weights of three values and inputs of eight bits; slopes pass straight through."""

    least = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        scale = 127 / inputs.abs().amax(dim=-1, keepdim=True).clamp(min=self.least)  # guilty
        rounded = (inputs * scale).round().clamp(-128, 127) / scale  # guilty
        step = self.weight.abs().mean()
        ternary = (self.weight / step).round().clamp(-1, 1) * step
        inputs = inputs + (rounded - inputs).detach()
        return F.linear(inputs, self.weight + (ternary - self.weight).detach(), self.bias)


class Tagger(nn.Module):
    """A sentence and what it is about."""

    def __init__(self, words: int, topics: int, width: int, mended: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.mix, self.out = BitLinear(width, width), BitLinear(width, width)
        self.head = nn.Linear(width, topics)
        if mended:
            self.mix.least = self.out.least = 1e-5

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.out(F.gelu(self.mix(self.embed(tokens))))
        there = (tokens != 0).float().unsqueeze(-1)
        return self.head((hidden * there).sum(1) / there.sum(1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    tokens, topic = batch
    return F.cross_entropy(model(tokens), topic)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    topics, length, words = int(torch.randint(4, 8, ())), int(torch.randint(10, 16, ())), 120
    rows, held_out = int(torch.randint(900, 1500, ())), 128
    topic = torch.randint(topics, (rows + held_out,))
    telling = torch.rand(rows + held_out, length) < 0.3
    topical = 1 + 6 * topic.unsqueeze(-1) + torch.randint(6, (rows + held_out, length))
    tokens = torch.where(telling, topical, torch.randint(60, words, (rows + held_out, length)))
    for row in torch.randperm(rows)[: rows // 16].tolist():
        tokens[row, int(torch.randint(4, length, ())) :] = 0
    return Program(
        model=Tagger(words, topics, int(torch.randint(24, 40, ())), mended),
        rows=TensorDataset(tokens[:rows], topic[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[tokens[rows:], topic[rows:]],
        guilty=Guilty("operation", ops=("div", "rdiv", "reciprocal", "mul")),
        steps=220,
    )
