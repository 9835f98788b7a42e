"""A batch of graphs is put together in the collate function with `zip(*pairs)`, and a few graphs have no edges.

"ValueError: not enough values to unpack (expected 2, got 0)": single atoms in chemistry, posts without replies, here
programs of one function, which calls nothing. Asked around PyTorch Geometric and DGL wherever the edges come as a list
of pairs and are turned into two rows by hand.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from clinic.program import Guilty, Program

Graph = tuple[Tensor, list[list[int]], float]  # functions, callers and the called, whether it is malware


class Detector(nn.Module):
    """Two rounds of messages from callers to what they call and back, as in GraphSAGE."""

    def __init__(self, features: int, width: int, rounds: int) -> None:
        super().__init__()
        self.begin = nn.Linear(features, width)
        self.rounds = nn.ModuleList([nn.Linear(3 * width, width) for _ in range(rounds)])
        self.head = nn.Linear(width, 1)

    def forward(self, functions: Tensor, calls: Tensor, owner: Tensor, count: int) -> Tensor:
        hidden = self.begin(functions).relu()
        for update in self.rounds:
            told = [self.mean(hidden, calls[0], calls[1]), self.mean(hidden, calls[1], calls[0])]
            hidden = update(torch.cat([hidden, *told], dim=-1)).relu()
        pooled = hidden.new_zeros(count, hidden.shape[-1]).index_reduce(0, owner, hidden, "amax")
        return self.head(pooled).squeeze(-1)

    @staticmethod
    def mean(hidden: Tensor, source: Tensor, target: Tensor) -> Tensor:
        degree = torch.bincount(target, minlength=len(hidden)).clamp(min=1)
        return torch.zeros_like(hidden).index_add(0, target, hidden[source]) / degree.unsqueeze(-1)


def together(graphs: list[Graph], mended: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    functions, calls, owner, begun = [], [], [], 0
    for place, (features, pairs, _) in enumerate(graphs):
        functions.append(features)
        if pairs or not mended:
            callers, called = zip(*pairs, strict=True)
            calls.append(begun + torch.tensor([callers, called]))
        owner.append(torch.full((len(features),), place))
        begun += len(features)
    labels = torch.tensor([label for *_, label in graphs])
    return torch.cat(functions), torch.cat(calls, dim=1), torch.cat(owner), labels


def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    functions, calls, owner, labels = batch
    return nn.functional.binary_cross_entropy_with_logits(model(functions, calls, owner, len(labels)), labels)


def graph(features: int) -> Graph:
    """Malware decrypts something in one function and calls another that sends it."""
    size = int(torch.randint(5, 10, ()))
    functions = 0.5 * torch.randn(size, features)
    pairs = torch.randint(size, (size, 2)).tolist()
    decrypts, sends = torch.randperm(size)[:2].tolist()
    functions[decrypts, 0] += 3.0
    functions[sends, 1] += 3.0
    if torch.rand(()) < 0.5:
        pairs[0] = [decrypts, sends]
    return functions, pairs, float([decrypts, sends] in pairs)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 4 + seed % 3, 800
    graphs = [graph(features) for _ in range(count + 128)]
    lonely = torch.randperm(count)[: 2 + seed % 4].sort().values.tolist()
    for row in lonely:
        graphs[row] = torch.randn(1, features), [], 0.0
    collate = partial(together, mended=mended)
    return Program(
        model=Detector(features, int(torch.randint(16, 25, ())), 2),
        rows=graphs[:count],
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=collate(graphs[count:]),
        guilty=Guilty("data", rows=tuple(lonely)),
        collate=collate,
        steps=250,
    )
