"""The vitals of updates that nobody has looked at yet, kept on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from resilient_train.events import Vitals

_MOST_UNREAD = 256  # bounds the memory when nobody looks for a long time

Mean = Callable[[torch.Tensor], torch.Tensor]


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

    def __init__(self, mean_over_ranks: Mean) -> None:
        self._mean = mean_over_ranks
        self._unread: list[_Unread] = []

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
        names = sorted({name for one in unread for name in one.metrics})  # an objective may report some now and then
        width = 2 + len(names)
        device = unread[0].loss.device
        cells: list[torch.Tensor] = []
        for one in unread:
            values = [one.loss, one.grad_norm, *(one.metrics.get(name, math.nan) for name in names)]
            cells += [torch.as_tensor(value, dtype=torch.float32, device=device).detach() for value in values]
        table = self._mean(torch.stack(cells).view(-1, width)).tolist()
        return [
            Vitals(one.tick, one.step, one.accepted, row[0], row[1], one.lr, dict(zip(names, row[2:], strict=True)))
            for one, row in zip(unread, table, strict=True)
        ]
