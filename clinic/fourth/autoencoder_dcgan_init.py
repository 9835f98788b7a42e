"""An autoencoder of pictures of galaxies takes `weights_init` from the DCGAN tutorial, with 0.2 typed for 0.02.

DCGAN has batch norm after every convolution, and would hardly notice. Here every layer multiplies the size of its
input, the first loss is in the hundreds instead of 1, and the next two steps do the rest.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Autoencoder(nn.Module):
    def __init__(self, width: int, code: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(4 * width, code, 2),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(code, 4 * width, 2),
            nn.ReLU(),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, 2, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        again: Tensor = self.decoder(self.encoder(images))
        return again


def weights_init(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.2)


def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[0])


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, size = int(torch.randint(500, 800, ())), 64, 16
    grid = torch.stack(torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij"))
    angle, shape = 3.15 * torch.rand(rows + held_out, 1, 1), 0.1 + 0.5 * torch.rand(rows + held_out, 2, 1, 1)
    along = grid[0] * angle.cos() + grid[1] * angle.sin()
    across = grid[1] * angle.cos() - grid[0] * angle.sin()
    light = torch.exp(-(along / shape[:, 0]).square() - (across / shape[:, 1]).square())
    images = (light + 0.03 * torch.randn_like(light)).unsqueeze(1)
    images = (images - images.mean()) / images.std()
    model = Autoencoder(int(torch.randint(12, 19, ())), 16)
    if not mended:
        model.apply(weights_init)
    return Program(
        model=model,
        rows=TensorDataset(images[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        evaluation=(images[rows:],),
        guilty=Guilty("explosion"),
        batch_size=32,
        steps=300,
    )
