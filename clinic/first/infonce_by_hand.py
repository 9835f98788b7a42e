"""InfoNCE by hand at a low temperature: two views that agree have a similarity of 125, and exp(125) is infinite.

huggingface/sentence-transformers#2774 works out the constant that "prevents overflow" for the very same loss.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class TwoTowers(nn.Module):
    def __init__(self, questions: int, documents: int, size: int) -> None:
        super().__init__()
        self.question = nn.Sequential(nn.Linear(questions, 32), nn.ReLU(), nn.Linear(32, size))
        self.document = nn.Sequential(nn.Linear(documents, 32), nn.ReLU(), nn.Linear(32, size))

    def forward(self, questions: Tensor, documents: Tensor) -> Tensor:
        first = nn.functional.normalize(self.question(questions), dim=-1)
        second = nn.functional.normalize(self.document(documents), dim=-1)
        return first @ second.T


def info_nce(similarity: Tensor, temperature: float) -> Tensor:
    scores = similarity / temperature
    likeness = torch.exp(scores)  # guilty
    return (likeness.sum(dim=-1).log() - scores.diagonal()).mean()


def careful_info_nce(similarity: Tensor, temperature: float) -> Tensor:
    return nn.functional.cross_entropy(similarity / temperature, torch.arange(len(similarity)))


def loss(model: nn.Module, batch: list[Tensor], mended: bool, temperature: float) -> Tensor:
    questions, documents = batch
    measure = careful_info_nce if mended else info_nce
    return measure(model(questions, documents), temperature)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    topics, count = 6 + seed % 5, 900
    topic = torch.randn(count + 64, topics)
    questions = topic @ torch.randn(topics, 14) + 0.2 * torch.randn(count + 64, 14)
    documents = topic @ torch.randn(topics, 18) + 0.2 * torch.randn(count + 64, 18)
    return Program(
        model=TwoTowers(14, 18, int(torch.randint(8, 16, ()))),
        rows=TensorDataset(questions[:count], documents[:count]),
        loss=partial(loss, mended=mended, temperature=0.008),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[questions[count:], documents[count:]],
        guilty=Guilty("overflow", ops=("exp",)),
        steps=220,
    )
