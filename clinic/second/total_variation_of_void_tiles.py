"""The steepness of a picture by `torch.hypot`, whose slope is zero over zero where the picture is perfectly flat.

Denoising of satellite tiles with isotropic total variation. A few tiles lie at the border of the swath and are partly
void; the output is set to zero there, and what multiplies NaN by zero does not get rid of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clinic.program import Guilty, Program


class Tiles(torch.utils.data.Dataset):
    """Noisy and clean tiles, and where there is anything to see."""

    def __init__(self, clean: Tensor, covered: Tensor) -> None:
        self.noisy = (clean + 0.3 * torch.randn(clean.shape)) * covered
        self.clean, self.covered = clean * covered, covered

    def __len__(self) -> int:
        return len(self.clean)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"noisy": self.noisy[row], "clean": self.clean[row], "covered": self.covered[row]}


class Denoiser(nn.Module):
    """Three convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.LeakyReLU(0.1),
            nn.Conv2d(channels, channels, 3, padding=1, groups=2),
            nn.LeakyReLU(0.1),
            nn.Conv2d(channels, 1, 3, padding=1),
        )

    def forward(self, noisy: Tensor) -> Tensor:
        return self.body(noisy)


def total_variation(pictures: Tensor) -> Tensor:
    down = pictures[..., 1:, :-1] - pictures[..., :-1, :-1]
    across = pictures[..., :-1, 1:] - pictures[..., :-1, :-1]
    return torch.hypot(down, across).mean()  # guilty


def smooth_total_variation(pictures: Tensor) -> Tensor:
    down = pictures[..., 1:, :-1] - pictures[..., :-1, :-1]
    across = pictures[..., :-1, 1:] - pictures[..., :-1, :-1]
    return (down.square() + across.square() + 1e-6).sqrt().mean()


def loss(model: nn.Module, batch: dict[str, Tensor], roughness: Callable[[Tensor], Tensor] = total_variation) -> Tensor:
    denoised = model(batch["noisy"]) * batch["covered"]
    return F.smooth_l1_loss(denoised, batch["clean"], beta=0.1) + 0.02 * roughness(denoised)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, channels = int(torch.randint(10, 14, ())), 2 * int(torch.randint(3, 6, ()))
    rows, held_out = int(torch.randint(400, 700, ())), 64
    coarse = torch.randn(rows + held_out, 1, 4, 4)
    clean = F.interpolate(coarse, size=(side, side), mode="bilinear", align_corners=True)
    border = torch.full((rows,), side)
    border[torch.randperm(rows)[: int(torch.randint(3, 8, ()))]] = side // 2
    covered = (torch.arange(side) < border.view(-1, 1, 1, 1)).float().expand(-1, -1, side, -1)
    whole = torch.ones(held_out, 1, side, side)
    return Program(
        model=Denoiser(channels),
        rows=Tiles(clean[:rows], covered),
        loss=partial(loss, roughness=smooth_total_variation) if mended else loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=torch.utils.data.default_collate(list(Tiles(clean[rows:], whole))),
        guilty=Guilty("operation", ops=("hypot",)),
        batch_size=20,
        steps=160,
    )
