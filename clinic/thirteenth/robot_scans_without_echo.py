"""A laser scanner reports a beam without an echo as infinite, as ROS wants it (REP 117), and the scan is trained on.

A robot learns to follow a corridor from ranges. In a corridor nearly all beams come back; a few scans look through an
open door or at glass. "LaserScan inf values: network outputs nan", with the answer to put in the scanner's range.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program

REACH = 12.0


class Follower(nn.Module):
    """How far from the middle of the corridor, and how far off its direction."""

    def __init__(self, beams: int, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, channels, 5, stride=2, padding=2),
            nn.BatchNorm1d(channels),
            nn.ReLU(),
            nn.Conv1d(channels, 2 * channels, 5, stride=2, padding=2),
            nn.BatchNorm1d(2 * channels),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * channels * (beams // 4), 2),
        )

    def forward(self, ranges: Tensor) -> Tensor:
        return self.body(ranges.unsqueeze(1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    ranges, pose = batch
    return nn.functional.mse_loss(model(ranges), pose)


def corridor(pose: Tensor, beams: int) -> Tensor:
    """Ranges between two walls that are two metres apart, with an end of the corridor at some distance."""
    angles = torch.linspace(-1.8, 1.8, beams) + pose[:, 1:]
    aside = torch.where(angles.sin() > 0, 1 - pose[:, :1], 1 + pose[:, :1]) / angles.sin().abs().clamp(min=1e-3)
    end = (3 + 7 * torch.rand(len(pose), 1)) / angles.cos().abs().clamp(min=1e-3)
    return torch.minimum(aside, end).clamp(max=REACH) * (1 + 0.02 * torch.randn(len(pose), beams))


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    beams, count = 48 + 8 * (seed % 3), 900
    pose = torch.stack([1.4 * torch.rand(count + 96) - 0.7, 0.5 * torch.randn(count + 96)], dim=-1)
    ranges = corridor(pose, beams)
    glass = torch.randperm(count)[: 5 + seed % 6].sort().values
    for row in glass.tolist():
        first, width = int(torch.randint(beams - 8, ())), int(torch.randint(2, 9, ()))
        ranges[row, first : first + width] = REACH if mended else torch.inf
    return Program(
        model=Follower(beams, int(torch.randint(24, 33, ()))),
        rows=TensorDataset(ranges[:count], pose[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[ranges[count:], pose[count:]],
        guilty=Guilty("data", rows=tuple(glass.tolist())),
        steps=1400,
    )
