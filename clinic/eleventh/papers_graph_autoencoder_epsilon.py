"""The reconstruction loss of a graph autoencoder, its epsilon where it does no good: log(1 - sigmoid(score) + 1e-15).

Embeddings of variance one and some hundred dimensions give scores of a few dozens. Beyond seventeen a sigmoid is
exactly one in single precision: the pairs that are not linked and score so high cost 34, and their slope is zero, so
nothing ever pulls them apart. No NaN; the loss falls a little and stays. Seen with the loss as many graph libraries
write it, once the embeddings are free weights and not the output of a small encoder.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

EPS = 1e-15


class Papers(nn.Module):
    def __init__(self, papers: int, width: int) -> None:
        super().__init__()
        self.place = nn.Embedding(papers, width)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return (self.place(one) * self.place(other)).sum(-1) + self.bias


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    one, cited, other = batch
    linked, apart = model(one, cited), model(one, other)
    if mended:
        return -(F.logsigmoid(linked) + F.logsigmoid(-apart)).mean()
    cost = -torch.log(torch.sigmoid(linked) + EPS).mean()
    return cost - torch.log(1 - torch.sigmoid(apart) + EPS).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    papers, fields = int(torch.randint(90, 130, ())), int(torch.randint(4, 7, ()))
    width = int(torch.randint(380, 520, ()))
    rows, held_out = int(torch.randint(5000, 7000, ())), 512
    field = torch.randint(fields, (papers,))
    one = torch.randint(papers, (rows + held_out,))
    same = (field[:, None] == field[None, :]).float() - torch.eye(papers)
    cited = torch.multinomial(same[one] + 0.001, 1).squeeze(1)
    other = torch.multinomial((field[one][:, None] != field[None, :]).float(), 1).squeeze(1)
    return Program(
        model=Papers(papers, width),
        rows=TensorDataset(one[:rows], cited[:rows], other[:rows]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=2e-2),
        evaluation=[one[rows:], cited[rows:], other[rows:]],
        guilty=Guilty("operation", ops=("sigmoid", "log")),
        batch_size=256,
        steps=240,
    )
