"""Which customers cancel their contract, by a transformer over the columns of a table (FT-Transformer).

The comparison of models has one YAML file, and its `learning_rate: 0.05` was found for gradient boosting, where it is
a modest value. For AdamW and attention it is fifty times too much: within a few updates the transformer says the same
of every customer, and the loss stays at that of the share of those who cancel. No value is ever odd. "Trees beat deep
learning on tabular data", somebody notes.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Columns(nn.Module):
    """A token for each column, a token for the answer, and blocks of attention."""

    def __init__(self, numbers: int, kinds: tuple[int, ...], width: int, depth: int) -> None:
        super().__init__()
        self.slope, self.offset = (nn.Parameter(torch.randn(numbers, width) / width**0.5) for _ in range(2))
        self.kinds = nn.ModuleList(nn.Embedding(kind, width) for kind in kinds)
        self.answer = nn.Parameter(torch.randn(1, 1, width) / width**0.5)
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, F.gelu, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, depth)
        self.head = nn.Linear(width, 1)

    def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
        tokens = numbers.unsqueeze(-1) * self.slope + self.offset
        chosen = [table(kind) for table, kind in zip(self.kinds, kinds.unbind(1), strict=True)]
        answer = self.answer.expand(len(numbers), -1, -1)
        state = self.blocks(torch.cat([answer, tokens, torch.stack(chosen, 1)], 1))
        return self.head(state[:, 0]).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    numbers, kinds, left = batch
    return F.binary_cross_entropy_with_logits(model(numbers, kinds), left)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    columns, sizes = int(torch.randint(6, 9, ())), (3, 4, int(torch.randint(5, 9, ())))
    count, held_out = int(torch.randint(2500, 3500, ())), 400
    total = count + held_out
    numbers = torch.randn(total, columns)
    kinds = torch.stack([torch.randint(size, (total,)) for size in sizes], 1)
    effects = [torch.randn(size) for size in sizes]
    risk = sum(effect[kind] for effect, kind in zip(effects, kinds.unbind(1), strict=True))
    # Those with a contract by the month leave when the price goes up, the others when the service gets worse.
    monthly = kinds[:, 0] == 0
    risk = 1.5 * risk + 3 * torch.where(monthly, numbers[:, 0], -numbers[:, 1]) + 1.5 * numbers[:, 2] - 1
    left = (torch.rand(total) < risk.sigmoid()).float()
    return Program(
        model=Columns(columns, sizes, 32, int(torch.randint(2, 4, ()))),
        rows=TensorDataset(numbers[:count], kinds[:count], left[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3 if mended else 0.05, weight_decay=1e-5),
        evaluation=[numbers[count:], kinds[count:], left[count:]],
        guilty=Guilty("explosion"),
        batch_size=64,
        steps=300,
    )
