"""Tomorrow's air pressure by a transformer encoder, and RAdam in place of Adam "because it needs no warm-up".

RAdam's first five steps are plain momentum: they do not divide by the size of the slope. Adam never minded that the
error is in squared pascals; those five steps at Adam's rate throw the weights away. Asked as "RAdam diverges at once
where Adam with the same learning rate works"; the authors' code has a switch for it, `degenerated_to_sgd`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

MEAN, SPREAD = 101325.0, 900.0  # pascals at sea level


class Barometer(nn.Module):
    """Reads pressures of some stations over some hours, all in pascals, and gives the first one's in six hours."""

    def __init__(self, stations: int, hours: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(stations, width)
        self.places = nn.Parameter(0.1 * torch.randn(hours, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def forward(self, readings: Tensor) -> Tensor:
        hidden = self.encoder(self.embed((readings - MEAN) / SPREAD) + self.places)
        return MEAN + SPREAD * self.head(hidden[:, -1]).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    readings, ahead = batch
    return nn.functional.mse_loss(model(readings), ahead)


def fronts(count: int, stations: int, hours: int) -> Tensor:
    """Waves of pressure that pass over a row of stations."""
    times = torch.arange(float(hours)).view(1, -1, 1)
    far = torch.arange(float(stations)).view(1, 1, -1)
    pressure = torch.zeros(count, hours, stations)
    for _ in range(2):
        strength, phase = torch.rand(count, 1, 1) + 0.3, 6.28 * torch.rand(count, 1, 1)
        speed, slowness = 0.15 + 0.2 * torch.rand(count, 1, 1), 0.5 * torch.randn(count, 1, 1)
        pressure += strength * torch.sin(speed * (times - slowness * far) + phase)
    return MEAN + SPREAD * (pressure + 0.05 * torch.randn(pressure.shape))


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    stations, hours, ahead, count = 3 + seed % 3, 16, 6, 900
    pressure = fronts(count + 96, stations, hours + ahead)
    readings, later = pressure[:, :hours], pressure[:, -1, 0]
    if mended:
        optimizer = partial(torch.optim.Adam, lr=2e-3)
    else:
        optimizer = partial(torch.optim.RAdam, lr=2e-3)  # guilty
    return Program(
        model=Barometer(stations, hours, 24 + 8 * (seed % 2)),
        rows=TensorDataset(readings[:count], later[:count]),
        loss=loss,
        optimizer=optimizer,
        evaluation=[readings[count:], later[count:]],
        guilty=Guilty("explosion"),
        steps=300,
    )
