"""What an update measured: sent to the host, and read one update later as vitals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import torch

from resilient_train.core.tree import leaves
from resilient_train.ground.types import Vitals

Metrics = Mapping[str, torch.Tensor | float]


class Sent:
    """A small vector on its way to the host. Reading it waits for its own copy, and for nothing queued after that."""

    def __init__(self, vector: torch.Tensor, numbers: list[float] | None = None) -> None:
        self._numbers, self._vector = numbers, vector
        self._arrived: torch.cuda.Event | None = None
        if numbers is None and vector.is_cuda:
            self._vector = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)  # torch caches pinned memory
            self._vector.copy_(vector, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[float]:
        """Return the numbers: the one place of a healthy update where the host may wait for the device."""
        if self._numbers is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._numbers = self._vector.tolist()
        return self._numbers


def landed(vitals: Vitals) -> Vitals:
    """Return the vitals as of an open gate: no limit has refused the update, only a loss scale may have."""
    if vitals.accepted or (vitals.loss_scale is not None and not isfinite(vitals.grad_norm)):
        return vitals
    return vitals._replace(step=vitals.step + 1, accepted=True, refused=None)


def where_not_finite(by_rank: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Return the ranks on which trouble began, without those that only received it; none if that does not show."""
    for place in (0, 1):  # the loss first: averaged gradients have their NaN on every rank
        bad = tuple(rank for rank, row in enumerate(by_rank) if not isfinite(row[place]))
        if 0 < len(bad) < len(by_rank):
            return bad
    return ()


def versions(batch: Any) -> list[int]:
    """Return how often each tensor of a batch was written to, to notice later writes."""
    return [leaf._version for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def mean(values: Sequence[torch.Tensor | float]) -> torch.Tensor:
    device = next((value.device for value in values if isinstance(value, torch.Tensor)), None)
    return torch.stack([torch.as_tensor(value, dtype=torch.float32, device=device) for value in values]).mean()


def scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"type {type(loss).__name__}"
        raise TypeError(f"guard.update takes the loss as a scalar tensor, not one of {what}")
    made: torch.Tensor = loss.detach()
    return made if made.dtype is torch.float32 and made.dim() == 0 else made.float().reshape(())
