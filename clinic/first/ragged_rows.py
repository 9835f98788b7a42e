"""All clips have the same length but for a few that were cut short, and they cannot be stacked.

qubvel-org/segmentation_models.pytorch#472 and milesial/Pytorch-UNet#285, "stack expects each tensor to be equal size".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from clinic.program import Guilty, Program


class Conv1dNet(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(1, channels, 7, stride=2), nn.ReLU(), nn.Conv1d(channels, channels, 5)
        )
        self.head = nn.Linear(channels, classes)

    def forward(self, clips: Tensor) -> Tensor:
        return self.head(self.convolutions(clips.unsqueeze(1)).relu().mean(dim=-1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    clips, labels = batch
    return nn.functional.cross_entropy(model(clips), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    classes, length, count = 3 + seed % 2, 48, 500
    labels = torch.randint(classes, (count + 64,))
    pitch = 0.3 + 0.35 * labels.unsqueeze(-1)
    clips = torch.sin(pitch * torch.arange(length) + 6 * torch.rand(count + 64, 1))
    clips = clips + 0.3 * torch.randn(count + 64, length)
    rows = list(zip(clips[:count], labels[:count].tolist(), strict=True))
    cut = torch.randperm(count)[: 1 + seed % 3].sort().values.tolist()
    left = torch.randint(length // 3, length - 1, (len(cut),)).tolist()
    if not mended:
        for row, samples in zip(cut, left, strict=True):
            rows[row] = clips[row, :samples], rows[row][1]
    return Program(
        model=Conv1dNet(int(torch.randint(8, 16, ())), classes),
        rows=rows,
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[clips[count:], labels[count:]],
        guilty=Guilty("data", rows=tuple(cut)),
        steps=180,
    )
