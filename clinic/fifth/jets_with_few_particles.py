"""Jets of a collider as clouds of particles: each particle looks at its nearest neighbours, as in ParticleNet.

Batches are padded to their largest jet. Most jets have few particles, and once in a while all jets of a batch have
fewer than the neighbours that `topk` is asked for: "selected index k out of range". The same ends runs on small
molecules and on point clouds with DGCNN.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from clinic.program import Guilty, Program

Row = tuple[Tensor, int]


def collate(rows: list[Row]) -> dict[str, Tensor]:
    jets, kinds = zip(*rows, strict=True)
    return {
        "particles": pad_sequence(list(jets), batch_first=True),
        "there": pad_sequence([torch.ones(len(jet), dtype=torch.bool) for jet in jets], batch_first=True),
        "kind": torch.tensor(kinds),
    }


class EdgeConv(nn.Module):
    """What each particle is beside its neighbours, and the mean over them."""

    def __init__(self, inputs: int, width: int, neighbours: int, mended: bool) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.neighbours, self.mended = neighbours, mended

    def forward(self, place: Tensor, there: Tensor, known: Tensor) -> Tensor:
        with torch.no_grad():
            away = torch.cdist(place, place).masked_fill(~there[:, None], 1e3)
            count = min(self.neighbours, away.shape[-1]) if self.mended else self.neighbours
            near = torch.topk(away, count, dim=-1, largest=False).indices  # guilty
        rows = torch.arange(len(known))[:, None, None]
        others, there = known[rows, near], there[rows, near].unsqueeze(-1)
        edges = self.edge(torch.cat([known[:, :, None].expand_as(others), others - known[:, :, None]], -1))
        return (edges * there).sum(2) / there.sum(2).clamp(min=1)


class ParticleNet(nn.Module):
    def __init__(self, width: int, neighbours: int, kinds: int, mended: bool) -> None:
        super().__init__()
        self.first = EdgeConv(3, width, neighbours, mended)
        self.second = EdgeConv(width, width, neighbours, mended)
        self.head = nn.Linear(width, kinds)

    def forward(self, particles: Tensor, there: Tensor) -> Tensor:
        known = self.first(particles[..., :2], there, particles)
        known = self.second(known, there, known) * there[..., None]
        return self.head(known.sum(1) / there.sum(1, keepdim=True))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["particles"], batch["there"]), batch["kind"])


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    kinds, neighbours = int(torch.randint(3, 5, ())), 12
    axes = torch.empty(kinds, 3, 2).uniform_(-1, 1)

    def jet() -> Row:
        kind = int(torch.randint(kinds, ()))
        few = float(torch.rand(())) < 0.84
        count = int(torch.randint(4, 12, ()) if few else torch.randint(12, 20, ()))
        prong = torch.randint(3, (count,))
        place = axes[kind, prong] + 0.12 * torch.randn(count, 2)
        return torch.cat([place, torch.rand(count, 1) + 0.5 * prong[:, None]], -1), kind

    rows, held_out = [jet() for _ in range(int(torch.randint(600, 900, ())))], [jet() for _ in range(128)]
    return Program(
        model=ParticleNet(int(torch.randint(24, 33, ())), neighbours, kinds, mended),
        rows=rows,
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=collate(held_out),
        guilty=Guilty("operation", ops=("topk",)),
        batch_size=16,
        steps=300,
        collate=collate,
    )
