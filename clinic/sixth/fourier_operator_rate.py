"""A Fourier neural operator for waves that steepen (Burgers), trained by Adam at the rate of the linear fit before it.

A step of Adam has the size of the rate whatever the size of a weight is, and the spectral weights of an operator begin
at one over the square of its width. At 0.2 they are noise after ten steps. Nothing spikes, and nothing is NaN: the
loss only stays many times above what a small part of the rate reaches. Forums know it as "my FNO predicts the mean".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

POINTS, MODES = 48, 12


class Spectral(nn.Module):
    """A product with weights of its own for each of the lowest frequencies, beside a linear map of each point."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.rand(width, width, MODES, 2) / width**2)
        self.point = nn.Conv1d(width, width, 1)

    def forward(self, state: Tensor) -> Tensor:
        low = torch.fft.rfft(state)[..., :MODES]
        mixed = torch.einsum("bik,iok->bok", low, torch.view_as_complex(self.spectrum))
        return torch.fft.irfft(F.pad(mixed, (0, POINTS // 2 + 1 - MODES)), n=POINTS) + self.point(state)


class Operator(nn.Module):
    """Lifts each point, mixes three times, and projects back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lift = nn.Conv1d(2, width, 1)
        self.mix = nn.ModuleList(Spectral(width) for _ in range(3))
        self.project = nn.Sequential(nn.Conv1d(width, 2 * width, 1), nn.GELU(), nn.Conv1d(2 * width, 1, 1))

    def forward(self, field: Tensor) -> Tensor:
        place = torch.linspace(0, 1, POINTS).expand_as(field)
        state = self.lift(torch.stack([field, place], 1))
        for layer in self.mix:
            state = F.gelu(layer(state))
        return self.project(state).squeeze(1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    before, after = batch
    return ((model(before) - after).norm(dim=-1) / after.norm(dim=-1)).mean()


def waves(count: int, viscosity: float) -> tuple[Tensor, Tensor]:
    """Smooth waves on a ring, before and after a while."""
    angle = 2 * torch.pi * torch.arange(POINTS) / POINTS
    orders = torch.arange(1, 5)[:, None]
    size = torch.randn(2, count, 4) / orders.T
    start = size[0] @ (orders * angle).sin() + size[1] @ (orders * angle).cos()
    field, gap, step = start, 2 * torch.pi / POINTS, 2e-3
    for _ in range(250):
        left, right = field.roll(1, -1), field.roll(-1, -1)
        flow = (right.square() - left.square()) / (4 * gap)
        field = field + step * (viscosity * (left + right - 2 * field) / gap**2 - flow)
    return start, field


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    viscosity = float(torch.empty(()).uniform_(0.15, 0.25))
    count = int(torch.randint(1000, 1400, ()))
    before, after = waves(count + 128, viscosity)
    return Program(
        model=Operator(int(torch.randint(20, 29, ()))),
        rows=TensorDataset(before[:count], after[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-3 if mended else 0.2),
        evaluation=[before[count:], after[count:]],
        guilty=Guilty("explosion"),
        batch_size=32,
        steps=320,
    )
