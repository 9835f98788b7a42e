"""Windows of an accelerometer are stored in half precision and normalised there, with an epsilon of 1e-8.

In float16 that epsilon is zero. A phone that lies on a table returns the same value for a whole window, and zero is
divided by zero. "eps=1e-8 does nothing in fp16": met by nearly everyone who calls `half()` on old code.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class ActivityNet(nn.Module):
    def __init__(self, axes: int, channels: int, classes: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.body = nn.Sequential(
            nn.Conv1d(axes, channels, 5, padding=2), nn.ReLU(), nn.Conv1d(channels, channels, 5, stride=2), nn.ReLU()
        )
        self.head = nn.Linear(channels, classes)

    def forward(self, windows: Tensor) -> Tensor:
        if self.mended:
            windows = windows.float()
        centred = windows - windows.mean(dim=-1, keepdim=True)
        spread = centred.square().mean(dim=-1, keepdim=True).sqrt()
        windows = centred / (spread + 1e-8)  # guilty
        return self.head(self.body(windows.float()).mean(dim=-1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    windows, labels = batch
    return nn.functional.cross_entropy(model(windows), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    axes, classes, length, count = 3, 4 + seed % 3, 40, 900
    labels = torch.randint(classes, (count + 128,))
    pace = (0.25 + 0.3 * labels)[:, None, None]
    phase = 6.28 * torch.rand(count + 128, axes, 1)
    windows = torch.sin(pace * torch.arange(length) + phase) + 0.4 * torch.randn(count + 128, axes, length)
    still = torch.randperm(count)[: 3 + seed % 4]
    windows[still, int(torch.randint(axes, ()))] = 1.0  # gravity, and nothing else
    return Program(
        model=ActivityNet(axes, int(torch.randint(12, 20, ())), classes, mended),
        rows=TensorDataset(windows[:count].half(), labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[windows[count:].half(), labels[count:]],
        guilty=Guilty("operation", ops=("div", "true_divide", "divide")),
    )
