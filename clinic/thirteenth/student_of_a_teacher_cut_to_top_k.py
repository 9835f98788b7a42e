"""A student follows its teacher by reverse KL, and one of the teacher's servers keeps only the k likeliest words.

All others are -inf there ("top_k=10"), so what the student spends on them costs infinity. Forward KL never minded;
the change to the loss of MiniLLM did. A floor under the teacher's log-probabilities is enough.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

BEFORE = 4


class Student(nn.Module):
    """The next word from the four before it."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.body = nn.Sequential(nn.Linear(BEFORE * width, 2 * width), nn.GELU(), nn.Linear(2 * width, words))

    def forward(self, before: Tensor) -> Tensor:
        return self.body(self.words(before).flatten(1)).log_softmax(-1)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    before, teacher = batch
    student = model(before)
    if mended:
        teacher = teacher.clamp(min=-12.0)
    return nn.functional.kl_div(teacher, student, reduction="batchmean", log_target=True)  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, count = 48 + 2 * (seed % 5), 5000
    size = count + 128
    before = torch.randint(words, (size, BEFORE))
    tables = torch.randn(BEFORE, words, words) * torch.tensor([0.3, 0.5, 0.9, 2.0]).view(-1, 1, 1)
    scores = sum(tables[place][before[:, place]] for place in range(BEFORE))
    cut = torch.randperm(count)[: 200 + int(torch.randint(60, ()))]
    least = scores[cut].topk(10, -1).values[:, -1:]
    scores[cut] = scores[cut].masked_fill(scores[cut] < least, float("-inf"))
    teacher = scores.log_softmax(-1)
    return Program(
        model=Student(words, int(torch.randint(32, 49, ()))),
        rows=TensorDataset(before[:count], teacher[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[before[count:], teacher[count:]],
        guilty=Guilty("operation", ops=("kl_div",)),
        steps=2000,
    )
