"""A softmax by hand, exp over the sum of exp: as the scores sharpen one passes 88, and inf / inf is NaN.

discuss.pytorch.org/t/softmax-implementation/118049: "Why is it necessary to substract the max of x?"
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


def softmax(scores: Tensor, mended: bool) -> Tensor:
    if mended:
        scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = torch.exp(scores)  # guilty
    return weights / weights.sum(dim=-1, keepdim=True)


class Lookup(nn.Module):
    """Finds the entry whose key matches the question, and answers with its value."""

    def __init__(self, size: int, hidden: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.query = nn.Linear(size, hidden)
        self.key = nn.Linear(size, hidden)

    def forward(self, question: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        scores = (self.key(keys) @ self.query(question).unsqueeze(-1)).squeeze(-1)
        return (softmax(scores, self.mended) * values).sum(dim=-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    question, keys, values, answers = batch
    return nn.functional.mse_loss(model(question, keys, values), answers)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    size, entries, count = 6 + seed % 4, 6 + seed % 5, 900
    keys, values = 2 * torch.randn(count + 64, entries, size), torch.randn(count + 64, entries)
    wanted = torch.randint(entries, (count + 64,))
    question = keys[torch.arange(count + 64), wanted] + 0.05 * torch.randn(count + 64, size)
    answers = values[torch.arange(count + 64), wanted]
    tensors = [question, keys, values, answers]
    return Program(
        model=Lookup(size, int(torch.randint(16, 32, ())), mended),
        rows=TensorDataset(*(tensor[:count] for tensor in tensors)),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-2),
        evaluation=[tensor[count:] for tensor in tensors],
        guilty=Guilty("overflow", ops=("exp",)),
    )
