"""A VQ-VAE whose codes become, every few batches, the means of what is assigned to them, as in mini-batch k-means.

A code to which such a batch assigns nothing becomes the mean of nothing, 0 / 0. The codebook is a buffer, without
a gradient; its NaN is the "nearest" code to everything from then on. The code of the papers guards against it; the
reproduction forgot to.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Codebook(nn.Module):
    codes: Tensor

    def __init__(self, count: int, width: int, every: int, mended: bool) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(count, width))
        self.mended, self.every, self.seen = mended, every, 0

    def forward(self, states: Tensor) -> Tensor:
        flat = states.flatten(0, 1)
        nearest = (flat.detach()[:, None] - self.codes).square().sum(-1).argmin(-1)
        codes = self.codes[nearest].reshape(states.shape)
        self.seen += self.training
        if self.training and self.seen % self.every == 0:
            self.follow(flat.detach(), F.one_hot(nearest, len(self.codes)).float())
        return codes

    def follow(self, states: Tensor, assigned: Tensor) -> None:
        counts = assigned.sum(0).unsqueeze(-1)
        if self.mended:
            means = torch.where(counts > 0, assigned.T @ states / counts.clamp(min=1), self.codes)
        else:
            means = assigned.T @ states / counts  # guilty
        self.codes = means


class VqVae(nn.Module):
    def __init__(self, count: int, width: int, every: int, mended: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(1, 24, 8, 4, 2), nn.ReLU(), nn.Conv1d(24, width, 4, 2, 1))
        self.codebook = Codebook(count, width, every, mended)
        self.decoder = nn.Sequential(
            nn.ConvTranspose1d(width, 24, 4, 2, 1), nn.ReLU(), nn.ConvTranspose1d(24, 1, 8, 4, 2)
        )

    def forward(self, signal: Tensor) -> tuple[Tensor, Tensor]:
        states = self.encoder(signal.unsqueeze(1)).mT
        codes = self.codebook(states)
        commitment = F.mse_loss(states, codes)
        passed = states + (codes - states).detach()
        return self.decoder(passed.mT).squeeze(1), commitment


def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    (signal,) = batch
    again, commitment = model(signal)
    total: Tensor = F.mse_loss(again, signal) + 0.25 * commitment
    return total


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    rows, held_out, length = int(torch.randint(600, 900, ())), 64, 96
    shapes, pieces = torch.randn(6, 16).cumsum(1) / 2, length // 16
    shapes = shapes - shapes.mean(1, keepdim=True)
    signals = shapes[torch.randint(len(shapes), (rows + held_out, pieces))].flatten(1)
    signals = signals + 0.1 * torch.randn_like(signals)
    return Program(
        model=VqVae(int(torch.randint(12, 20, ())), 6, int(torch.randint(8, 25, ())), mended),
        rows=TensorDataset(signals[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3, betas=(0.9, 0.99)),
        evaluation=(signals[rows:],),
        guilty=Guilty("operation", ops=("div", "truediv", "true_divide")),
        batch_size=32,
        steps=320,
    )
