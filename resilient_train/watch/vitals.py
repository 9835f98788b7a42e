"""The vitals of updates that nobody has looked at yet, kept on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from resilient_train.events import Vitals

_MOST_UNREAD = 256  # bounds the memory when nobody looks for a long time


class Ranks(Protocol):
    """What reading asks of the other processes."""

    def mean(self, vector: torch.Tensor) -> torch.Tensor:
        """Average over the ranks."""

    def union(self, names: Iterable[str]) -> list[str]:
        """Every name that any rank knows, in the same order everywhere."""


@dataclass(frozen=True, slots=True)
class _Unread:
    tick: int
    step: int
    accepted: bool
    lr: float
    loss: torch.Tensor
    grad_norm: torch.Tensor
    metrics: Mapping[str, torch.Tensor | float]


class VitalsLog:
    """Keeps what updates measured as the tensors they are; reading costs one host read and one reduction for all."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._unread: list[_Unread] = []
        self._names: list[str] = []  # of the metrics, as all ranks have agreed

    def record(
        self,
        *,
        tick: int,
        step: int,
        accepted: bool,
        lr: float,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        metrics: Mapping[str, torch.Tensor | float],
    ) -> None:
        """Remember an update without waiting for it."""
        self._unread.append(_Unread(tick, step, accepted, lr, loss, grad_norm, metrics))

    @property
    def is_full(self) -> bool:
        """Say that it is time to read."""
        return len(self._unread) >= _MOST_UNREAD

    def read(self) -> list[Vitals]:
        """Return the vitals of all updates since the last reading, in order. Waits for the device."""
        unread, self._unread = self._unread, []
        if not unread:
            return []
        seen = {name for one in unread for name in one.metrics}
        rows, anybody_saw_more = self._reduced(unread, saw_more=not seen <= set(self._names))
        if anybody_saw_more:  # known to every rank, so all of them come here: a metric may appear on one rank alone
            self._names = self._ranks.union([*self._names, *seen])
            rows, _ = self._reduced(unread, saw_more=False)
        return [self._vitals(one, row) for one, row in zip(unread, rows, strict=True)]

    def _reduced(self, unread: list[_Unread], *, saw_more: bool) -> tuple[list[list[float]], bool]:
        """Average over ranks: loss, norm, and for each metric the sum of its values and of the ranks that have it."""
        device = unread[0].loss.device
        cells: list[torch.Tensor | float] = [float(saw_more)]
        for one in unread:
            cells += [one.loss, one.grad_norm]
            for name in self._names:
                cells += [one.metrics.get(name, 0.0), float(name in one.metrics)]
        vector = torch.stack([torch.as_tensor(cell, dtype=torch.float32, device=device) for cell in cells])
        flag, *values = self._ranks.mean(vector).tolist()
        width = 2 + 2 * len(self._names)
        return [values[start : start + width] for start in range(0, len(values), width)], flag > 0

    def _vitals(self, one: _Unread, row: list[float]) -> Vitals:
        loss, grad_norm, *rest = row
        pairs = zip(self._names, rest[::2], rest[1::2], strict=True)
        metrics = {name: total / share if share else math.nan for name, total, share in pairs}
        return Vitals(one.tick, one.step, one.accepted, loss, grad_norm, one.lr, metrics)
