"""A small U-Net lights up night photos; the loss compares them as shown on a display, `clamp(0, 1) ** (1 / 2.2)`.

Where the network says less than black, the power's slope is infinite and that of the clamp zero: NaN. Met in inverse
rendering and in denoising of raw photos, "nan gradients after I added the gamma correction to the loss".
"""

from __future__ import annotations

from functools import partial

import torch
from program import Guilty, Program
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class UNet(nn.Module):
    def __init__(self, channels: int, black: float) -> None:
        super().__init__()
        self.black = black
        self.first = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU())
        self.inner = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Upsample(scale_factor=2),
        )
        self.last = nn.Conv2d(2 * channels, 1, 3, padding=1)
        nn.init.constant_(self.last.bias, 0.5)

    def forward(self, photos: Tensor) -> Tensor:
        outside = self.first(photos)
        return self.last(torch.cat([outside, self.inner(outside)], dim=1))

    def shown(self, light: Tensor) -> Tensor:
        return light.clamp(self.black, 1) ** (1 / 2.2)  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    photos, light = batch
    return nn.functional.l1_loss(model.shown(model(photos)), model.shown(light))


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, count = 12 + 4 * (seed % 2), 500
    coarse = torch.rand(count + 64, 1, side // 4, side // 4)
    light = nn.functional.interpolate(coarse, size=side, mode="bilinear")
    gain = 3 + torch.rand(count + 64, 1, 1, 1)
    photos = light * gain + 0.3 * torch.randn(light.shape)
    return Program(
        model=UNet(int(torch.randint(6, 11, ())), 1e-3 if mended else 0.0),
        rows=TensorDataset(photos[:count], light[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[photos[count:], light[count:]],
        guilty=Guilty("operation", ops=("pow", "__pow__")),
        steps=250,
    )
