"""What an objective reports beside its loss, read when somebody looks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch


class Ranks(Protocol):
    """What reading asks of the other processes."""

    def mean(self, vector: torch.Tensor) -> torch.Tensor:
        """Average over the ranks."""

    def union(self, names: Iterable[str]) -> list[str]:
        """Every name that any rank knows, in the same order everywhere."""


class Metrics:
    """Keeps the newest update's metrics as the tensors they are; reading costs one host read and one reduction."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._newest: Mapping[str, torch.Tensor | float] = {}
        self._names: list[str] = []  # as all ranks have agreed

    def note(self, metrics: Mapping[str, torch.Tensor | float]) -> None:
        """Remember an update's metrics without waiting for them."""
        self._newest = metrics

    def read(self) -> dict[str, float]:
        """Return the newest metrics, averaged over the ranks that have them. Waits for the device."""
        values, anybody_has_more = self._reduced(has_more=not self._newest.keys() <= set(self._names))
        if anybody_has_more:  # known to every rank, so all come here: a metric may appear on one rank alone
            self._names = self._ranks.union([*self._names, *self._newest])
            values, _ = self._reduced(has_more=False)
        pairs = zip(self._names, values[::2], values[1::2], strict=True)
        return {name: total / share if share else math.nan for name, total, share in pairs}

    def _reduced(self, *, has_more: bool) -> tuple[list[float], bool]:
        """Average over ranks, for each metric: its values, and the share of ranks that have it."""
        cells: list[torch.Tensor | float] = [float(has_more)]
        for name in self._names:
            cells += [self._newest.get(name, 0.0), float(name in self._newest)]
        vector = torch.stack([torch.as_tensor(cell, dtype=torch.float32, device=self._device) for cell in cells])
        flag, *values = self._ranks.mean(vector).tolist()
        return values, flag > 0
