"""A radiance field of rooms seen from above, whose transmittance is a cumulated sum of logarithms.

What passes each sample is multiplied along the ray; to be safe somebody wrote it as the exponential of a sum of
`log(1 - alpha)`. Walls are solid: as training makes them denser, alpha rounds to 1 and the logarithm is of zero. The
original code adds 1e-10 at this place, and ports of it often do not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

SAMPLES, FAR = 24, 4.0


class Field(nn.Module):
    """Sines of the place, three layers, and what a ray sees: colours weighed by what reaches them."""

    def __init__(self, width: int, octaves: int, by_density: bool) -> None:
        super().__init__()
        self.octaves, self.by_density = octaves, by_density
        self.body = nn.Sequential(
            nn.Linear(4 * octaves, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        )

    def forward(self, origin: Tensor, way: Tensor) -> Tensor:
        step = FAR / SAMPLES
        far = (torch.arange(SAMPLES) + 0.5) * step
        place = origin.unsqueeze(1) + far[:, None] * way.unsqueeze(1)
        waves = torch.cat([place * 2.0**octave for octave in range(self.octaves)], dim=-1)
        found = self.body(torch.cat([waves.sin(), waves.cos()], dim=-1))
        density, colour = found[..., 0].exp(), found[..., 1:].sigmoid()
        alpha = 1 - (-density * step).exp()
        passed = -density * step if self.by_density else (1 - alpha).log()  # guilty
        reaches = F.pad(passed.cumsum(-1)[:, :-1], (1, 0)).exp()
        return ((reaches * alpha).unsqueeze(-1) * colour).sum(1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    origin, way, colour = batch
    return F.mse_loss(model(origin, way), colour)


def views(count: int, pillars: Tensor, wide: Tensor, paint: Tensor) -> list[Tensor]:
    """Rays from around, and the paint of the first pillar that each meets."""
    angle, aside = 2 * torch.pi * torch.rand(count), 0.5 * torch.randn(count)
    origin = 2 * torch.stack([angle.cos(), angle.sin()], dim=-1)
    turned = angle + torch.pi + aside
    way = torch.stack([turned.cos(), turned.sin()], dim=-1)
    apart = pillars - origin.unsqueeze(1)
    along = (apart * way.unsqueeze(1)).sum(-1)
    room = wide.square() - apart.square().sum(-1) + along.square()
    far = torch.where((room > 0) & (along > 0), along - room.clamp(min=0).sqrt(), 99.0)
    nearest, which = far.min(-1)
    return [origin, way, paint[which] * (nearest < FAR).unsqueeze(-1)]


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count = int(torch.randint(4, 7, ()))
    pillars, wide, paint = 1.6 * torch.rand(count, 2) - 0.8, 0.2 + 0.2 * torch.rand(count), torch.rand(count, 3)
    data, held_out = views(3000, pillars, wide, paint), views(500, pillars, wide, paint)
    return Program(
        model=Field(int(torch.randint(48, 64, ())), 4, by_density=mended),
        rows=TensorDataset(*data),
        loss=loss,
        optimizer=lambda weights: torch.optim.Adam(weights, lr=1e-2, eps=1e-15),
        evaluation=held_out,
        guilty=Guilty("operation", ops=("log",)),
        batch_size=64,
        steps=400,
    )
