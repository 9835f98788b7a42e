"""Traffic of the next quarter of an hour on a network of roads, by neural diffusion on the graph (as in GRAND).

The state of the crossings flows along the edges in explicit steps of Euler, x - tau * L x. With attention that sums to
one, as in the paper, tau may be 1. Here L is the plain Laplacian, whose largest eigenvalue is beyond twice the largest
degree: each step multiplies the roughest wave by ten or more, and each step back does the same to the slope. The loss
is astronomical in the first update and NaN soon after. What helps is a tau below one over the largest degree.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Diffusion(nn.Module):
    """In, a few steps of flow between neighbours and change within a node, and out."""

    laplacian: Tensor

    def __init__(self, laplacian: Tensor, past: int, width: int, depth: int, tau: float) -> None:
        super().__init__()
        self.register_buffer("laplacian", laplacian)
        self.inside, self.outside = nn.Linear(past, width), nn.Linear(width, 1)
        self.change = nn.Linear(width, width)
        self.depth, self.tau = depth, tau

    def forward(self, flow: Tensor) -> Tensor:
        state = self.inside(flow)
        for _ in range(self.depth):
            state = state - self.tau * (self.laplacian @ state) + 0.1 * self.change(state).tanh()
        return self.outside(state).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    flow, after = batch
    return F.mse_loss(model(flow), after)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    nodes, past, depth = int(torch.randint(40, 61, ())), 4, int(torch.randint(6, 9, ()))
    place = torch.rand(nodes, 2)
    near = (torch.cdist(place, place) < 0.24).float().fill_diagonal_(0)
    laplacian = near.sum(-1).diag() - near
    most = float(near.sum(-1).max())
    # What really happens: traffic spreads to the neighbours, and a wave of the day goes on.
    spread = torch.linalg.matrix_exp(-0.25 * laplacian)
    count, held_out = int(torch.randint(1200, 1800, ())), 200
    flow = [torch.linalg.matrix_exp(-0.05 * laplacian) @ torch.randn(nodes, count + held_out)]
    for _ in range(past):
        flow.append(1.1 * spread @ flow[-1] + 0.1 * torch.randn(nodes, count + held_out))
        flow[-1] = flow[-1] / flow[-1].std()
    seen, after = torch.stack(flow[:-1], -1).transpose(0, 1), flow[-1].T
    return Program(
        model=Diffusion(laplacian, past, int(torch.randint(16, 25, ())), depth, 0.9 / most if mended else 1.0),
        rows=TensorDataset(seen[:count], after[:count]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.9),
        evaluation=[seen[count:], after[count:]],
        guilty=Guilty("explosion"),
        steps=400,
    )
