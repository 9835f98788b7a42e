"""The solubility of molecules and salts by a Graphormer: attention between atoms fades with the bonds between them.

The way between two atoms of different ions has no length; the shortest-path routine writes `inf`. On the way forward
that is right, for their attention is exp(-inf) = 0. On the way back the slope of the score, which is 0, is multiplied
by `inf` to give the slope of how fast attention fades: NaN. Only batches that hold a salt are hit. Graphormer itself
writes a distance of 510 for what cannot be reached.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

KINDS, ATOMS = 6, 10


class Block(nn.Module):
    """Attention that fades with distance, for each head at its own pace."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fade = nn.Parameter(torch.linspace(0.2, 1.0, heads))
        self.think = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, state: Tensor, distance: Tensor) -> Tensor:
        query, key, value = self.mix(self.first(state)).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        score = query @ key.mT / query.shape[-1] ** 0.5
        score = score - self.fade[:, None, None] * distance.unsqueeze(1)  # guilty
        state = state + self.out((score.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return state + self.think(self.second(state))


class Graphormer(nn.Module):
    """Atoms by kind and number of bonds, two blocks, and a sum over the atoms."""

    def __init__(self, width: int, unreachable: float) -> None:
        super().__init__()
        self.unreachable = unreachable
        self.kind, self.bonds = nn.Embedding(KINDS, width), nn.Embedding(ATOMS, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, kind: Tensor, distance: Tensor) -> Tensor:
        state = self.kind(kind) + self.bonds((distance == 1).sum(-1))
        distance = distance.clamp(max=self.unreachable)
        for block in self.blocks:
            state = block(state, distance)
        return self.head(self.norm(state)).mean(1).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    kind, distance, target = batch
    return F.mse_loss(model(kind, distance), target)


def molecules(count: int, polarity: Tensor, salts: float) -> list[Tensor]:
    """Random trees of bonds; a salt lacks a bond. Neighbours of opposite polarity make it soluble."""
    bond = torch.zeros(count, ATOMS, ATOMS)
    rows, salt = torch.arange(count), torch.rand(count) < salts
    for atom in range(1, ATOMS):
        other = (torch.rand(count) * atom).long()
        bond[rows, atom, other] = 1.0 - (salt & (atom == ATOMS // 2)).float()
    bond = bond + bond.mT
    distance = torch.where(bond > 0, 1.0, torch.inf)
    distance.diagonal(dim1=1, dim2=2).zero_()
    for middle in range(ATOMS):
        distance = torch.minimum(distance, distance[:, :, middle, None] + distance[:, None, middle])
    kind = torch.randint(KINDS, (count, ATOMS))
    charge = polarity[kind]
    around = (bond @ charge.unsqueeze(-1)).squeeze(-1) / bond.sum(-1).clamp(min=1)
    target = 3 * (charge - around).abs().mean(-1) + charge.mean(-1)
    return [kind, distance, target]


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    polarity = torch.randn(KINDS)
    data = molecules(int(torch.randint(1500, 2200, ())), polarity, 0.01)
    return Program(
        model=Graphormer(int(torch.randint(8, 13, ())) * 4, unreachable=20.0 if mended else torch.inf),
        rows=TensorDataset(*data),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1.5e-3),
        evaluation=molecules(300, polarity, 0.0),
        guilty=Guilty("operation", ops=("mul", "rmul")),
        steps=400,
    )
