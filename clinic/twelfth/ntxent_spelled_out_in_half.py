"""SimCLR's loss written out in half precision: exp(similarity / 0.07) is above 65504 as soon as a pair agrees.

A cosine of one over 0.07 is 14.3, and exp(11.1) is all that float16 can hold. At first no pair agrees that well, and
training goes; then numerator and denominator are infinite, and their ratio is NaN. An issue of most repositories with
an NT-Xent loss ("loss becomes nan with fp16"); mended by going back to float32 before the exponential.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Projector(nn.Module):
    """Embeds a view of a signal on the unit sphere, in half precision as the rest of the code base wants it."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 48))

    def forward(self, view: Tensor) -> Tensor:
        return nn.functional.normalize(self.net(view), dim=-1).half()


TEMPERATURE = 0.07


def nt_xent(model: nn.Module, batch: list[Tensor], *, mended: bool) -> Tensor:
    one, other = (model(view) for view in batch)
    similar = (one.unsqueeze(1) * other.unsqueeze(0)).sum(-1) / TEMPERATURE
    if mended:
        similar = similar.float()
    weights = similar.exp()  # guilty
    share = weights.diagonal() / weights.sum(1)  # guilty
    return -share.float().clamp_min(1e-6).log().mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 20 + seed % 6, 1000
    causes = torch.randn(count + 64, 6)
    causes[:, 0] = causes[:, 0].sign()
    views = [causes @ torch.randn(6, features) + 0.5 * torch.randn(count + 64, features) for _ in range(2)]
    return Program(
        model=Projector(features, int(torch.randint(48, 80, ()))),
        rows=TensorDataset(*(view[:count] for view in views)),
        loss=partial(nt_xent, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[view[count:] for view in views],
        guilty=Guilty("overflow", ops=("exp", "sum")),
        steps=240,
    )
