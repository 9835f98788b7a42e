"""A mixture without a fixed number of parts: weights of a broken stick, its pieces drawn from Kumaraswamy's law.

Once a shopper plainly belongs to one part, a piece takes all that is left of the stick, the next weights are exactly
zero, and the logarithm of a weight has no slope there. Stick-breaking autoencoders are known to end in "nan"; their
users keep the pieces off zero and one.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Kumaraswamy, Normal
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

EULER = 0.57721566


class StickBreakingMixture(nn.Module):
    def __init__(self, features: int, parts: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 2 * (parts - 1)))
        self.centre = nn.Parameter(torch.randn(parts, features))
        self.log_width = nn.Parameter(torch.zeros(parts, features))

    def pieces(self, x: Tensor) -> Kumaraswamy:
        a, b = (F.softplus(self.encoder(x)) + 0.05).chunk(2, -1)
        return Kumaraswamy(a, b)


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """From a uniform piece."""
    return ((a - 1) / a * (-EULER - torch.digamma(b) - 1 / b) + a.log() + b.log() - (b - 1) / b).sum(-1)


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    (x,) = batch
    law = model.pieces(x)
    piece = law.rsample()
    if mended:
        piece = piece.clamp(1e-4, 1 - 1e-4)
    left = F.pad(torch.cumprod(1 - piece, -1), (1, 0), value=1.0)
    weight = F.pad(piece, (0, 1), value=1.0) * left
    of_part = Normal(model.centre, model.log_width.exp()).log_prob(x.unsqueeze(1)).sum(-1)
    fit = torch.logsumexp(torch.log(weight) + of_part, -1)  # guilty
    return (0.02 * divergence(law.concentration1, law.concentration0) - fit).mean()  # little, against collapse


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, kinds = int(torch.randint(6, 10, ())), int(torch.randint(4, 6, ()))
    shoppers, held_out = int(torch.randint(900, 1300, ())), 256
    habits = 2.5 * torch.randn(kinds, features)
    x = habits[torch.randint(kinds, (shoppers + held_out,))] + 0.4 * torch.randn(shoppers + held_out, features)
    return Program(
        model=StickBreakingMixture(features, 8, int(torch.randint(24, 40, ()))),
        rows=TensorDataset(x[:shoppers]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=2e-2),
        evaluation=[x[shoppers:]],
        guilty=Guilty("operation", ops=("log",)),
        batch_size=64,
        steps=300,
    )
