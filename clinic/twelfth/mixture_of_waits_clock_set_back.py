"""A mixture of log-normals for waiting times, and a few waits that end before they begin.

Where the server's clock was set back between the two stamps, the wait is negative, and `log_prob` raises "Expected
value argument ... to be within the support (GreaterThan(lower_bound=0.0))". Asked again and again since
`validate_args` is on by default. No reading of such a row makes it right: they are left out.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, LogNormal, MixtureSameFamily
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class WaitModel(nn.Module):
    """How long a call waits, as a mixture that depends on the state of the queue."""

    def __init__(self, features: int, width: int, parts: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 3 * parts)

    def forward(self, queue: Tensor) -> MixtureSameFamily:
        choice, place, spread = self.head(self.body(queue)).chunk(3, -1)
        return MixtureSameFamily(Categorical(logits=choice), LogNormal(place, nn.functional.softplus(spread) + 0.05))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    queue, waits = batch
    return -model(queue).log_prob(waits).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 5 + seed % 3, 1100
    queue = torch.randn(count + 128, features)
    quick = torch.rand(count + 128) < torch.sigmoid(2 * queue[:, 1])
    middle = torch.where(quick, -0.5 + 0.5 * queue[:, 0], 1.2 + queue[:, 2])
    waits = torch.exp(middle + 0.2 * torch.randn(count + 128))
    broken = torch.randperm(count)[: 12 + seed % 5].sort().values
    kept = torch.ones(count, dtype=torch.bool)
    kept[broken] = False
    waits[broken] -= 3600.0
    if not mended:
        kept[:] = True
    return Program(
        model=WaitModel(features, int(torch.randint(32, 49, ())), 3),
        rows=TensorDataset(queue[:count][kept], waits[:count][kept]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=4e-3),
        evaluation=[queue[count:], waits[count:]],
        guilty=Guilty("data", rows=tuple(broken.tolist())),
        steps=260,
    )
