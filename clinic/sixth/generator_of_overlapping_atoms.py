"""A Boltzmann generator: a flow whose samples should be the shapes of a small cluster of atoms, judged by their energy.

An untrained flow lays atoms over each other, and the potential of Lennard and Jones is the twelfth power of one over
their distance: energies of 1e20 and more, and slopes beyond what the square in Adam can hold. The paper caps energies
by their logarithm; simulations that let atoms appear use a soft core. The bare formula is what repositories begin with.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Coupling(nn.Module):
    """Scales and moves one half of the coordinates by what the other half says."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(size // 2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.last = nn.Linear(width, size)
        nn.init.uniform_(self.last.weight, -0.01, 0.01)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = state.chunk(2, -1)
        scale, shift = self.last(self.net(kept)).chunk(2, -1)
        scale = scale.tanh()
        return torch.cat([moved * scale.exp() + shift, kept], -1), scale.sum(-1)


class Flow(nn.Module):
    """Real NVP over the coordinates of atoms in a plane."""

    def __init__(self, atoms: int, width: int) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(2 * atoms, width) for _ in range(6))

    def forward(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        grown = latent.new_zeros(len(latent))
        for coupling in self.couplings:
            latent, more = coupling(latent)
            grown = grown + more
        return latent.view(len(latent), -1, 2), grown


def energy(places: Tensor, depth: float, soft: float) -> Tensor:
    """Lennard-Jones between all pairs, and a weak spring to the middle. In units of kT."""
    first, second = torch.triu_indices(places.shape[1], places.shape[1], 1)
    squared = (places[:, first] - places[:, second]).square().sum(-1)
    sixth = 1 / (squared**3 + soft)
    return (4 * depth * (sixth**2 - sixth)).sum(-1) + 0.5 * places.square().sum((1, 2))


def loss(model: nn.Module, batch: list[Tensor], depth: float, soft: float) -> Tensor:
    places, grown = model(batch[0])
    prior = Normal(0.0, 1.0).log_prob(batch[0]).sum(-1)
    return (energy(places, depth, soft) - grown + prior).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    atoms, depth = int(torch.randint(4, 6, ())), float(torch.empty(()).uniform_(0.8, 1.2))
    latent, held_out = torch.randn(int(torch.randint(6000, 9000, ())), 2 * atoms), torch.randn(1000, 2 * atoms)
    return Program(
        model=Flow(atoms, int(torch.randint(32, 65, ()))),
        rows=TensorDataset(latent),
        loss=partial(loss, depth=depth, soft=0.1 if mended else 0.0),
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[held_out],
        guilty=Guilty("explosion"),
        batch_size=64,
        steps=600,
    )
