"""What the runs of `attacks.py` train: rows of which one is bad, and code whose errors hold what must not get out."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Rows:
    """64 rows, of which one is not finite: a run has an incident, and a row in quarantine."""

    def __init__(self, token: str = "") -> None:
        numbers = torch.Generator().manual_seed(3)
        self.x, self.y = torch.randn(64, 8, generator=numbers), torch.randint(4, (64,), generator=numbers)
        self.x[13, 2] = float("nan")

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class SayingRows(Rows):
    """Two of them cannot be read, for a reason that holds what ATTACK_SAYS is."""

    def __getitem__(self, index: int) -> Any:
        if index in (5, 6):
            raise OSError(f"cannot read: {os.environ['ATTACK_SAYS']}")
        return super().__getitem__(index)


_calls = 0


def says(model: nn.Module, batch: Any) -> Tensor:
    """Ends the run after a while with an error that holds what ATTACK_SAYS is."""
    global _calls
    _calls += 1
    if _calls > 15:
        raise RuntimeError(f"cannot log in: {os.environ['ATTACK_SAYS']}")
    return F.cross_entropy(model(batch[0]), batch[1])
