"""Evidential classification of scans: the evidence is `exp` of the logits, as in the paper, and the rest a Dirichlet.

A few scans were never windowed and are a hundred times brighter than the others, and their logits grow with them. As
the net gets sure, `exp` of such a logit is beyond float32, and the KL divergence to the flat Dirichlet is inf - inf.
Issues of repositories for evidential learning: "loss is nan after some epochs with exp evidence, fine once clamped".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Dirichlet, kl_divergence
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Evidence(nn.Module):
    """A small CNN whose outputs are the concentrations of a Dirichlet."""

    def __init__(self, width: int, classes: int, mended: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, padding=1)
        self.head = nn.Linear(2 * width, classes)
        self.mended = mended

    def forward(self, scan: Tensor) -> Tensor:
        hidden = F.max_pool2d(F.relu(self.first(scan)), 2)
        logits = self.head(F.relu(self.second(hidden)).amax((-2, -1)))
        if self.mended:
            return torch.exp(logits.clamp(max=10)) + 1
        return torch.exp(logits) + 1  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    scan, label = batch
    alpha = model(scan)
    truth = F.one_hot(label, alpha.shape[-1]).float()
    fit = (truth * (torch.digamma(alpha.sum(-1, keepdim=True)) - torch.digamma(alpha))).sum(-1)
    wrong = Dirichlet(truth + (1 - truth) * alpha, validate_args=False)
    flat = Dirichlet(torch.ones_like(alpha), validate_args=False)
    return fit.mean() + 0.0005 * kl_divergence(wrong, flat).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    size, classes = 12, int(torch.randint(3, 5, ()))
    count, held_out = int(torch.randint(800, 1200, ())), 128
    shapes = torch.randn(classes, 1, size, size)
    label = torch.randint(classes, (count + held_out,))
    scan = (shapes[label] + 0.8 * torch.randn(count + held_out, 1, size, size)).abs()
    unwindowed = torch.rand(count + held_out) < 0.006
    scan[unwindowed] *= float(torch.empty(()).uniform_(80, 120))
    return Program(
        model=Evidence(int(torch.randint(8, 13, ())), classes, mended),
        rows=TensorDataset(scan[:count], label[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[scan[count:], label[count:]],
        guilty=Guilty("overflow", ops=("exp",)),
        steps=360,
    )
