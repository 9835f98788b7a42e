"""Charges of the atoms of a chain from Hueckel's theory: a network gives the matrix, `eigh` the orbitals.

Molecules are padded to the longest one. With two padded atoms the matrix has the eigenvalue 0 twice, and the gradient
of the eigenvectors divides by the difference. Most molecules are long enough; the short ones make it NaN.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

Molecules = tuple[Tensor, Tensor]


def charges(onsite: Tensor, bonds: Tensor, there: Tensor, pads: Tensor) -> Tensor:
    """The electrons on every atom, with two in each of the lower half of the orbitals."""
    onsite = torch.where(there, onsite, pads)
    bonds = bonds * (there[:, 1:] & there[:, :-1])
    matrix = torch.diag_embed(onsite) + torch.diag_embed(bonds, 1) + torch.diag_embed(bonds, -1)
    _, orbitals = torch.linalg.eigh(matrix)  # guilty
    occupied = torch.arange(onsite.shape[1]) < there.sum(1, keepdim=True) // 2
    electrons: Tensor = 2 * (orbitals.square() * occupied[:, None]).sum(-1)
    return electrons * there


class Hueckel(nn.Module):
    def __init__(self, elements: int, width: int, pads: Tensor) -> None:
        super().__init__()
        self.element = nn.Embedding(elements + 1, width, padding_idx=0)
        self.surroundings = nn.Conv1d(width, width, 3, padding=1)
        self.onsite = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        self.bond = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh(), nn.Linear(width, 1))
        self.pads: Tensor
        self.register_buffer("pads", pads, persistent=False)

    def forward(self, atoms: Tensor) -> Tensor:
        states = self.element(atoms)
        states = states + torch.tanh(self.surroundings(states.mT)).mT
        onsite = -11 + self.onsite(states).squeeze(-1)  # electron volts
        bonds = -2.5 + self.bond(torch.cat([states[:, 1:], states[:, :-1]], dim=-1)).squeeze(-1)
        return charges(onsite, bonds, atoms > 0, self.pads)


def loss(model: nn.Module, batch: Molecules) -> Tensor:
    atoms, electrons = batch
    return F.mse_loss(model(atoms), electrons)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    elements, longest = int(torch.randint(4, 7, ())), 8
    rows, held_out = int(torch.randint(500, 800, ())), 64
    far = 40 + 5.0 * torch.arange(longest)  # above all orbitals, and no two of them are the same
    onsite, bonds = -11 + 2.5 * torch.randn(elements + 1), -2.5 + 0.4 * torch.randn(elements + 1, elements + 1)
    atoms = torch.randint(1, elements + 1, (rows + held_out, longest))
    atoms[torch.rand(rows + held_out) < 0.3, -1] = 0
    short = torch.randperm(rows)[: int(torch.randint(2, 6, ()))]
    atoms[short, -int(torch.randint(2, 5, ())) :] = 0
    bond = (bonds[atoms[:, 1:], atoms[:, :-1]] + bonds[atoms[:, :-1], atoms[:, 1:]]) / 2
    electrons = charges(onsite[atoms], bond, atoms > 0, far)
    return Program(
        model=Hueckel(elements, 24, far if mended else torch.zeros(longest)),
        rows=TensorDataset(atoms[:rows], electrons[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3, amsgrad=True),
        evaluation=(atoms[rows:], electrons[rows:]),
        guilty=Guilty("operation", ops=("linalg_eigh", "eigh")),
        batch_size=32,
        steps=300,
    )
