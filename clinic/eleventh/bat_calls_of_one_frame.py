"""Calls of bats, clip by clip through strided convolutions with instance norm; of the shortest, one frame is left.

"ValueError: Expected more than 1 spatial element when training, got input size torch.Size([1, 32, 1])": asked about
encoders of sound and images whose input now and then is too small for the strides. A detector that cuts calls out of
a recording makes a few very short clips.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from clinic.program import Guilty, Program


class CallNet(nn.Module):
    def __init__(self, bands: int, width: int, species: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for come in (bands, width, width):
            layers += [nn.Conv1d(come, width, 3, stride=2, padding=1), nn.InstanceNorm1d(width, affine=True), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, species)

    def forward(self, clip: Tensor) -> Tensor:
        return self.head(self.layers(clip).amax(-1))


def loss(model: nn.Module, batch: list[tuple[Tensor, Tensor]]) -> Tensor:
    logits = torch.cat([model(clip.unsqueeze(0)) for clip, _ in batch])  # of many lengths: one by one
    return nn.functional.cross_entropy(logits, torch.stack([label for _, label in batch]))


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    bands, species = int(torch.randint(16, 24, ())), int(torch.randint(4, 6, ()))
    clips, held_out = int(torch.randint(400, 600, ())), 96
    band = torch.arange(bands).view(-1, 1)
    slopes = torch.linspace(-0.8, 0.8, species)
    calls: list[tuple[Tensor, Tensor]] = []
    for length in torch.randint(20, 56, (clips + held_out,)).tolist():
        label = torch.randint(species, ())
        pitch = bands * torch.rand(()) + slopes[label] * torch.arange(length)
        calls.append((torch.exp(-(((band - pitch % bands) / 1.5) ** 2)) + 0.1 * torch.randn(bands, length), label))
    short = torch.randperm(clips)[: 3 + seed % 3].sort().values.tolist()
    for row in short:
        clip, label = calls[row]
        clip = clip[:, : int(torch.randint(4, 9, ()))]
        calls[row] = nn.functional.pad(clip, (0, 20 - clip.shape[-1])) if mended else clip, label
    return Program(
        model=CallNet(bands, int(torch.randint(24, 36, ())), species),
        rows=calls[:clips],
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=calls[clips:],
        guilty=Guilty("data", rows=tuple(short)),
        batch_size=12,
        collate=list,
    )
