"""The mean over a sequence, as a masked sum divided by its length, of vectors that are kept in half precision.

`(hidden * mask).sum(1) / mask.sum(1)` is what every tutorial of mean pooling has. In half precision the sum of a long
sequence exceeds 65504 though its mean is far from it. Here a detector counts gamma rays by channel each second, for
half a minute as a rule; the few measurements that were left running give an infinite sum, an infinite mean and a NaN.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from clinic.program import Guilty, Program


class Nuclide(nn.Module):
    def __init__(self, channels: int, kinds: int, width: int, mended: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))
        self.layers = nn.Sequential(nn.Linear(channels, width), nn.ReLU(), nn.Linear(width, kinds))
        self.mended = mended

    def forward(self, counts: Tensor, mask: Tensor) -> Tensor:
        hidden = counts * self.gain.to(counts.dtype)
        if self.mended:
            hidden = hidden.float()
        total = (hidden * mask.unsqueeze(-1).to(hidden.dtype)).sum(dim=1)  # guilty
        pooled = total / mask.sum(dim=1, keepdim=True)
        return self.layers(torch.log1p(pooled.float().clamp(min=0)))


def collate(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    return {
        "counts": pad_sequence([counts for counts, _ in rows], batch_first=True),
        "mask": pad_sequence([torch.ones(len(counts), dtype=torch.half) for counts, _ in rows], batch_first=True),
        "kinds": torch.tensor([kind for _, kind in rows]),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["counts"], batch["mask"]), batch["kinds"])


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    kinds, channels, count = int(torch.randint(5, 8, ())), 12, int(torch.randint(500, 700, ()))
    spectra = 60 + 540 * torch.rand(kinds, channels).square()
    lengths = torch.randint(20, 41, (count + 128,))
    left_running = torch.randperm(count)[: 5 + seed % 4]
    lengths[left_running] = torch.randint(240, 300, (len(left_running),))
    measured: list[tuple[Tensor, int]] = []
    for length in lengths.tolist():
        kind = int(torch.randint(kinds, ()))
        rate = spectra[kind] * (0.4 * torch.randn(channels)).exp()
        measured.append((torch.poisson(rate.clamp(max=1200).expand(length, -1)).half(), kind))
    return Program(
        model=Nuclide(channels, kinds, 32, mended),
        rows=measured[:count],
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=collate(measured[count:]),
        guilty=Guilty("overflow", ops=("sum",)),
        collate=collate,
        steps=240,
    )
