"""Energies of small molecules by a SchNet, rewritten from Keras to torch, with the optimizer at its defaults.

`RMSprop()` of Keras has a rate of 0.001, `torch.optim.RMSprop` one of 0.01. The same word is ten times as hot, and the
errors in energy stay several times as large as before. Found in many questions of the kind "the same network is worse
in PyTorch".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

KINDS, CENTRES = 4, 20


class Interaction(nn.Module):
    """Messages of all other atoms, each filtered by how far away it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(CENTRES, width), nn.Softplus(), nn.Linear(width, width))
        self.before = nn.Linear(width, width, bias=False)
        self.after = nn.Sequential(nn.Linear(width, width), nn.Softplus(), nn.Linear(width, width))

    def forward(self, atoms: Tensor, spread: Tensor, others: Tensor) -> Tensor:
        filters = self.filter(spread) * others
        return atoms + self.after(torch.einsum("bijw,bjw->biw", filters, self.before(atoms)))


class SchNet(nn.Module):
    """An embedding of each element, three interactions, and a sum over the atoms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.element = nn.Embedding(KINDS, width)
        self.interactions = nn.ModuleList(Interaction(width) for _ in range(3))
        self.energy = nn.Sequential(nn.Linear(width, width // 2), nn.Softplus(), nn.Linear(width // 2, 1))

    def forward(self, kinds: Tensor, places: Tensor) -> Tensor:
        gaps = torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist").unsqueeze(-1)
        spread = (-10 * (gaps - torch.linspace(0.5, 5, CENTRES)).square()).exp()
        others = 1 - torch.eye(kinds.shape[1]).unsqueeze(-1)
        atoms = self.element(kinds)
        for interaction in self.interactions:
            atoms = interaction(atoms, spread, others)
        return self.energy(atoms).sum((1, 2))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    kinds, places, energy = batch
    return F.l1_loss(model(kinds, places), energy)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    atoms, count, held_out = int(torch.randint(6, 9, ())), int(torch.randint(1200, 1600, ())), 200
    total = count + held_out
    kinds = torch.randint(KINDS, (total, atoms))
    corner = torch.stack(torch.meshgrid(*[torch.arange(2.0)] * 3, indexing="ij"), -1).view(8, 3)[:atoms]
    places = 1.3 * corner + 0.25 * torch.randn(total, atoms, 3)
    depth, best = torch.rand(2, KINDS, KINDS)
    depth, best = depth + depth.T, 1 + 0.5 * (best + best.T)
    first, second = torch.triu_indices(atoms, atoms, 1)
    gaps = (places[:, first] - places[:, second]).norm(dim=-1)
    pair = kinds[:, first], kinds[:, second]
    energy = (depth[pair] * ((1 - (best[pair] - gaps).exp()).square() - 1)).sum(-1) + torch.randn(KINDS)[kinds].sum(-1)
    energy = (energy - energy.mean()) / energy.std()
    return Program(
        model=SchNet(int(torch.randint(24, 41, ()))),
        rows=TensorDataset(kinds[:count], places[:count], energy[:count]),
        loss=loss,
        optimizer=partial(torch.optim.RMSprop, lr=1e-3) if mended else torch.optim.RMSprop,
        evaluation=[kinds[count:], places[count:], energy[count:]],
        guilty=Guilty("explosion"),
        batch_size=32,
        steps=400,
    )
