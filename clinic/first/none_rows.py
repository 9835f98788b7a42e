"""The reader gives None for what it cannot decode, as OpenCV does, and the batch cannot be put together.

Megvii-BaseDetection/YOLOX#1523, "default_collate: batch must contain tensors, [...]; found <class 'NoneType'>".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from clinic.program import Guilty, Program


class Scans(Dataset[dict[str, Tensor | None]]):
    def __init__(self, scans: Tensor, depths: Tensor, unreadable: list[int]) -> None:
        self.scans = scans
        self.depths = depths
        self.unreadable = unreadable

    def read(self, row: int) -> Tensor | None:
        return None if row in self.unreadable else self.scans[row]

    def __len__(self) -> int:
        return len(self.scans)

    def __getitem__(self, row: int) -> dict[str, Tensor | None]:
        return {"depth": self.depths[row], "scan": self.read(row)}


class DepthNet(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(length, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, scans: Tensor) -> Tensor:
        return self.layers(scans).squeeze(-1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.smooth_l1_loss(model(batch["scan"]), batch["depth"])


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    length, count = 12 + seed % 9, 700
    depths = 4 * torch.rand(count + 64)
    scans = torch.exp(-((torch.arange(length) * 4 / length - depths.unsqueeze(-1)) ** 2))
    scans = scans + 0.05 * torch.randn(count + 64, length)
    unreadable = torch.randperm(count)[: 1 + seed % 5].sort().values.tolist()
    return Program(
        model=DepthNet(length, int(torch.randint(16, 40, ()))),
        rows=Scans(scans[:count], depths[:count], [] if mended else unreadable),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation={"scan": scans[count:], "depth": depths[count:]},
        guilty=Guilty("data", rows=tuple(unreadable)),
        steps=200,
    )
