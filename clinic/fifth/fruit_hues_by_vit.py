"""How ripe a fruit is, by a small vision transformer that sees hue, saturation and value in place of red, green, blue.

The conversion divides by the difference of the largest and the smallest channel and by the largest. Photos that were
padded to a square have pixels that are exactly black, where both are zero: 0 / 0. Libraries had this fault in their
conversions for years, and notebooks still write it so.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

SIZE, PATCH = 20, 5


def to_hsv(image: Tensor, floor: float) -> Tensor:
    """Hue as a point on a circle, saturation and value."""
    red, green, blue = image.unbind(1)
    value, spread = image.amax(1), image.amax(1) - image.amin(1)
    lean = torch.where(value == red, green - blue, torch.where(value == green, blue - red, red - green))
    sector = torch.where(value == red, 0.0, torch.where(value == green, 2.0, 4.0))
    hue = (sector + lean / (spread + floor)) * torch.pi / 3  # guilty
    saturation = spread / (value + floor)  # guilty
    return torch.stack([hue.cos(), hue.sin(), saturation, value], dim=1)


class Block(nn.Module):
    """Attention and two linear layers, with a norm before each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.look = nn.MultiheadAttention(width, 4, batch_first=True)
        self.think = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, state: Tensor) -> Tensor:
        normed = self.first(state)
        state = state + self.look(normed, normed, normed, need_weights=False)[0]
        return state + self.think(self.second(state))


class ViT(nn.Module):
    """Patches with a place each, a token for the class, and two blocks."""

    def __init__(self, width: int, floor: float) -> None:
        super().__init__()
        self.floor = floor
        self.patches = nn.Conv2d(4, width, PATCH, stride=PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2 + 1, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, image: Tensor) -> Tensor:
        state = self.patches(to_hsv(image, self.floor)).flatten(2).mT
        state = torch.cat([self.token.expand(len(state), -1, -1), state], dim=1) + self.place
        return self.head(self.norm(self.blocks(state))[:, 0]).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    image, ripe = batch
    return F.mse_loss(model(image), ripe)


def photos(count: int, padded: float) -> tuple[Tensor, Tensor]:
    """A disc from green to red on a bluish table; some photos were wide and have black bars."""
    ripe, light = 2 * torch.rand(count, 1, 1) - 1, 0.6 + 0.4 * torch.rand(count, 1, 1)
    grid = torch.arange(SIZE) + 0.5
    y, x = SIZE * (0.35 + 0.3 * torch.rand(2, count, 1, 1))
    disc = ((grid[:, None] - y).square() + (grid - x).square() < (SIZE * 0.3) ** 2).float()
    colour = torch.stack([0.5 + 0.4 * ripe, 0.5 - 0.4 * ripe, 0.1 + 0 * ripe], dim=1)
    table = torch.tensor([0.3, 0.35, 0.5])[:, None, None] * (0.5 + torch.rand(count, 1, 1, 1))
    image = (disc.unsqueeze(1) * colour + (1 - disc).unsqueeze(1) * table) * light.unsqueeze(1)
    image = (image + 0.05 * torch.randn(image.shape)).clamp(0.01, 1) + 1e-3 * torch.rand(image.shape)
    bars = (torch.rand(count, 1) < padded) & ((grid < 3) | (grid > SIZE - 3))
    return image * ~bars[:, None, :, None], 2 * ripe.flatten()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    data, held_out = photos(int(torch.randint(900, 1300, ())), 0.1), photos(200, 0.1)
    return Program(
        model=ViT(int(torch.randint(8, 12, ())) * 4, floor=1e-6 if mended else 0.0),
        rows=TensorDataset(*data),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.05),
        evaluation=list(held_out),
        guilty=Guilty("operation", ops=("div", "truediv", "true_divide")),
        batch_size=32,
        steps=300,
    )
