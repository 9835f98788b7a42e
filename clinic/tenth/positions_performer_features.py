"""How well a position on a small board stands, by a Performer: attention through positive random features.

The features are `exp(w q - |q|^2 / 2)`, as in the paper, but without subtracting the largest exponent first, as the
code of its authors does. Embeddings are scaled by the root of their width, so queries and keys are long, the features
of some token all round to zero, and the normalisation of attention is 0 / 0: the loss is NaN within the first batches.
Met by people who write FAVOR+ from its formula and leave out the `eps` and `amax` of the softmax kernel.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Favor(nn.Module):
    """Attention that is linear in the number of points of the board."""

    projection: Tensor

    def __init__(self, width: int, features: int, safe: bool) -> None:
        super().__init__()
        self.mixed = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.register_buffer("projection", torch.randn(features, width))
        self.safe = safe

    def features(self, rows: Tensor, over: tuple[int, ...]) -> Tensor:
        powers = rows @ self.projection.T - rows.square().sum(dim=-1, keepdim=True) / 2
        if self.safe:
            return torch.exp(powers - powers.amax(dim=over, keepdim=True).detach()) + 1e-4
        return torch.exp(powers)

    def forward(self, tokens: Tensor) -> Tensor:
        queries, keys, values = self.mixed(tokens).chunk(3, dim=-1)
        scale = queries.shape[-1] ** -0.25
        asked, held = self.features(scale * queries, (-1,)), self.features(scale * keys, (-2, -1))
        summed = asked @ (held.transpose(-2, -1) @ values)
        total = asked @ held.sum(dim=-2).unsqueeze(-1)
        return self.out(summed / total)  # guilty


class Judge(nn.Module):
    def __init__(self, width: int, points: int, safe: bool) -> None:
        super().__init__()
        self.embedding, self.scale = nn.Embedding(3, width), width**0.5  # as in the first transformer
        self.places = nn.Parameter(torch.randn(points, width))
        self.attention = nn.ModuleList([Favor(width, width, safe) for _ in range(1)])
        self.forwards = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(1)]
        )
        self.head = nn.Linear(width, 1)

    def forward(self, boards: Tensor) -> Tensor:
        tokens = self.embedding(boards) * self.scale + self.places
        for attention, forward in zip(self.attention, self.forwards, strict=True):
            tokens = tokens + attention(tokens)
            tokens = tokens + forward(tokens)
        return self.head(tokens.mean(dim=1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    boards, worth = batch
    return nn.functional.mse_loss(model(boards), worth)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, count = 4, 900
    boards = torch.randint(3, (count + 128, side * side))
    power = torch.randn(side * side)
    worth = ((boards == 1).float() - (boards == 2).float()) @ power / power.norm()
    return Program(
        model=Judge(52 + 4 * (seed % 3), side * side, safe=mended),
        rows=TensorDataset(boards[:count], worth[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[boards[count:], worth[count:]],
        guilty=Guilty("operation", ops=("div", "true_divide")),
        batch_size=24,
        steps=300,
    )
