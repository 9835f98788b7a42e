"""A pointer network's probabilities are zero where it must not point, and the labels are smoothed over all places.

The target gives a tenth to every stop alike, those that were visited among them, and the cross-entropy by hand takes
the logarithm of their probability: inf from the first batch on, and NaN as soon as its slope meets that of the softmax.
Asked about masked actions, constrained decoding and `KLDivLoss` with smoothing; here the next stop of a delivery tour.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Pointer(nn.Module):
    """Looks at all stops and points at the one to go to next, which is none that was visited."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stop = nn.Linear(4, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.point = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, stops: Tensor, visited: Tensor) -> Tensor:
        seen = self.encoder(self.stop(torch.cat([stops, visited.unsqueeze(-1).float()], dim=-1)))
        return self.point(seen).squeeze(-1).masked_fill(visited, -math.inf).softmax(dim=-1)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    stops, visited, following = batch
    chance = model(stops, visited)
    if mended:
        chance = chance.clamp(min=1e-9)
    among = ~visited if mended else torch.ones_like(visited)
    target = 0.1 * among / among.sum(dim=-1, keepdim=True)
    target = target + 0.9 * nn.functional.one_hot(following, stops.shape[1])
    return -(target * chance.log()).sum(dim=-1).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    size, count = 8 + seed % 4, 1200
    places = torch.rand(count + 128, size, 2)
    urgent = (torch.rand(count + 128, size) < 0.25).float()
    visited = torch.rand(count + 128, size) < 0.4
    visited[:, 0] = True  # the van stands there
    visited[:, -1] = False
    apart = places - places[:, :1]
    cost = apart.norm(dim=-1) - 0.3 * urgent  # what the dispatchers did
    following = cost.masked_fill(visited, math.inf).argmin(dim=1)
    stops = torch.cat([apart, urgent.unsqueeze(-1)], dim=-1)
    return Program(
        model=Pointer(32 + 8 * (seed % 3), 1),
        rows=TensorDataset(stops[:count], visited[:count], following[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[stops[count:], visited[count:], following[count:]],
        guilty=Guilty("operation", ops=("log",)),
        steps=260,
    )
