"""Page views by a negative binomial with `probs=torch.sigmoid(...)`, as the parameter is called in the documentation.

A page that has spread has some million views, and the sigmoid of what it takes for that mean is exactly one in single
precision: "Expected parameter probs to satisfy the constraint HalfOpenInterval(lower_bound=0.0, upper_bound=1.0)".
The same number passed on as `logits=` has no such edge.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import NegativeBinomial
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class ViewsModel(nn.Module):
    """Views of a page from its words, its author and what is known of where it was shared."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(features, 1)
        self.deep = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 1))
        self.log_failures = nn.Parameter(torch.zeros(()))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_failures.exp(), (self.wide(features) + self.deep(features)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    features, views = batch
    failures, logits = model(features)
    if mended:
        return -NegativeBinomial(failures, logits=logits).log_prob(views).mean()
    return -NegativeBinomial(failures, probs=torch.sigmoid(logits)).log_prob(views).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, rows, held_out = int(torch.randint(8, 13, ())), int(torch.randint(1500, 2200, ())), 256
    every = rows + held_out
    x = torch.randn(every, features)
    effect = torch.randn(features)
    spread = (torch.rand(every) < 0.08).float()
    spread[rows:] *= 0  # pages that are judged are ordinary ones
    x[:, 0] = (spread - 0.08) / 0.27
    effect[0] = 0.0
    log_mean = 5 + 1.5 * (x @ effect) / effect.norm() + (10.5 + torch.rand(every)) * spread
    mean = log_mean.exp() * torch.distributions.Gamma(1.5, 1.5).sample((every,))
    views = torch.poisson(mean.double()).float()
    model = ViewsModel(features, int(torch.randint(16, 32, ())))
    nn.init.constant_(model.wide.bias, float(views[:rows].mean().log()))  # begin at the mean, as people do
    return Program(
        model=model,
        rows=TensorDataset(x[:rows], views[:rows]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=3e-2),
        evaluation=[x[rows:], views[rows:]],
        guilty=Guilty("operation", ops=("sigmoid",)),
        batch_size=64,
        steps=400,
    )
