"""The shape of molecules: guessed and true atoms are laid over each other with a singular value decomposition.

Kabsch's rotation is part of the loss, and the slope goes through it. Where all atoms lie in a line, as in a molecule of
two, two singular values are zero and the slope of `svd` divides by their gap. The rotation is the best one already, so
that no slope through it is needed; much code for conformers lets it flow all the same.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

KINDS, ATOMS = 4, 7


class Shape(nn.Module):
    """From the kinds of a chain's atoms to their places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kind = nn.Embedding(KINDS + 1, 8)
        self.body = nn.Sequential(
            nn.Linear(8 * ATOMS, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 3 * ATOMS)
        )

    def forward(self, kinds: Tensor) -> Tensor:
        return self.body(self.kind(kinds).flatten(1)).unflatten(-1, (ATOMS, 3))


def rotation(guess: Tensor, right: Tensor) -> Tensor:
    """The rotation that lays one over the other."""
    left, _, other = torch.linalg.svd(guess.mT @ right)  # guilty
    side = torch.det(left @ other).sign()
    turned = torch.cat([left[..., :2], left[..., 2:] * side[:, None, None]], dim=-1)
    return turned @ other


def loss(model: nn.Module, batch: list[Tensor], detached: bool) -> Tensor:
    kinds, right = batch
    there = (kinds < KINDS).float().unsqueeze(-1)
    guess = model(kinds)
    middle = (guess * there).sum(1, keepdim=True) / there.sum(1, keepdim=True)
    guess = (guess - middle) * there
    turn = rotation(guess.detach() if detached else guess, right)
    return ((guess @ turn - right).square().sum(-1).sum(-1) / there.sum((1, 2))).mean()


def molecules(count: int, lines: float) -> tuple[Tensor, Tensor]:
    """Chains whose bonds and angles depend on the kinds, each turned at random."""
    size = torch.randint(4, ATOMS + 1, (count, 1))
    size[torch.rand(count) < lines] = 2
    kinds = torch.randint(KINDS, (count, ATOMS))
    kinds[torch.arange(ATOMS) >= size] = KINDS
    far, bend = torch.tensor([1.0, 1.3, 1.6, 2.0, 0.0])[kinds], torch.tensor([0.4, 0.8, -0.5, 1.1, 0.0])[kinds]
    angle, lift = bend.cumsum(-1), (2 * bend).cumsum(-1).sin()
    steps = far.unsqueeze(-1) * F.normalize(torch.stack([angle.cos(), angle.sin(), lift], dim=-1), dim=-1)
    there = (kinds < KINDS).float().unsqueeze(-1)
    place = steps.cumsum(1)
    place = (place - (place * there).sum(1, keepdim=True) / there.sum(1, keepdim=True)) * there
    turn, _ = torch.linalg.qr(torch.randn(count, 3, 3))
    turn = turn * torch.det(turn).sign()[:, None, None]
    return kinds, place @ turn


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    data, held_out = molecules(int(torch.randint(1500, 2200, ())), 0.04), molecules(250, 0.0)
    return Program(
        model=Shape(int(torch.randint(64, 96, ()))),
        rows=TensorDataset(*data),
        loss=partial(loss, detached=mended),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=list(held_out),
        guilty=Guilty("operation", ops=("svd", "linalg_svd")),
        batch_size=32,
        steps=400,
    )
