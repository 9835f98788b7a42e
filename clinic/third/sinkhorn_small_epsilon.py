"""Optimal transport by the iteration of Sinkhorn, with an epsilon so small that a row of the kernel is all zero.

A net that predicts where the cells of an embryo will be. Two clouds that are far apart have a kernel of exp(-200): the
scaling divides by zero, and it does so in the middle of a loop.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

EPSILON, ROUNDS = 0.05, 15


def transport(first: Tensor, second: Tensor) -> Tensor:
    """The cost of the entropic plan between uniform clouds."""
    cost = (first.unsqueeze(2) - second.unsqueeze(1)).square().sum(-1)
    kernel, share = torch.exp(-cost / EPSILON), 1 / cost.shape[-1]
    v = torch.full_like(cost[:, 0], share)
    for _ in range(ROUNDS):
        u = share / torch.einsum("bij,bj->bi", kernel, v)  # guilty
        v = share / torch.einsum("bij,bi->bj", kernel, u)  # guilty
    return torch.einsum("bi,bij,bj,bij->b", u, kernel, v, cost)


def transport_in_logarithms(first: Tensor, second: Tensor) -> Tensor:
    cost = (first.unsqueeze(2) - second.unsqueeze(1)).square().sum(-1)
    level = -torch.full((), float(cost.shape[-1])).log()
    g = torch.zeros_like(cost[:, 0])
    for _ in range(ROUNDS):
        f = EPSILON * (level - torch.logsumexp((g.unsqueeze(1) - cost) / EPSILON, dim=2))
        g = EPSILON * (level - torch.logsumexp((f.unsqueeze(2) - cost) / EPSILON, dim=1))
    plan = ((f.unsqueeze(2) + g.unsqueeze(1) - cost) / EPSILON).exp()
    return (plan * cost).sum((1, 2))


class Mover(nn.Module):
    """A cloud and a dose, and the cloud a day later."""

    def __init__(self, doses: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2 + doses, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.head = nn.Linear(width, 2)

    def forward(self, cloud: Tensor, dose: Tensor) -> Tensor:
        given = dose.unsqueeze(1).expand(-1, cloud.shape[1], -1)
        return cloud + self.head(self.body(torch.cat([cloud, given], dim=-1)))


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    cloud, dose, later = batch
    distance = transport_in_logarithms if mended else transport
    return distance(model(cloud, dose), later).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    cells, doses = int(torch.randint(8, 14, ())), int(torch.randint(2, 5, ()))
    rows, held_out = int(torch.randint(500, 900, ())), 96
    cloud = 0.4 * torch.randn(rows + held_out, cells, 2)
    dose = torch.rand(rows + held_out, doses)
    strong = torch.randperm(rows)[: rows // 12]
    dose[strong, 0] += 1.6
    moved = cloud * 0.8 + torch.stack([1.2 * dose[:, 0].square(), 0.6 * dose[:, 1]], dim=-1).unsqueeze(1)
    later = moved + 0.05 * torch.randn_like(moved)
    return Program(
        model=Mover(doses, int(torch.randint(24, 40, ()))),
        rows=TensorDataset(cloud[:rows], dose[:rows], later[:rows]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[cloud[rows:], dose[rows:], later[rows:]],
        guilty=Guilty("operation", ops=("div", "rdiv", "reciprocal")),
        steps=200,
    )
