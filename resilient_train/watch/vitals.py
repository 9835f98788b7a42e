"""What one update measured: sent to the host, read one update later, and made into vitals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from resilient_train.state.tree import leaves
from resilient_train.types import Signal, Vitals


class Sent:
    """A small vector on its way to the host. Reading it waits for its own copy and for nothing queued after it."""

    def __init__(self, vector: torch.Tensor, numbers: list[float] | None = None) -> None:
        self._numbers = numbers
        self._vector = vector
        self._arrived: torch.cuda.Event | None = None
        if numbers is None and vector.is_cuda:
            self._vector = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)  # torch caches pinned memory
            self._vector.copy_(vector, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[float]:
        """The numbers: the one place of a healthy update where the host may wait for the device."""
        if self._numbers is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._numbers = self._vector.tolist()
        return self._numbers


def read_vitals(
    tick: int,
    step: int,
    start: int,
    stop: int,
    lr: float,
    numbers: Sequence[float],
    limits: tuple[float, float],
    *,
    has_scale: bool,
    is_busy: bool = False,
    pace: float = 0.0,
    by_rank: Callable[[], Sequence[Sequence[float]]] = tuple,
) -> Vitals:
    """Say what the numbers of an update mean, which passed the gate or not; `step` updates were accepted before it.

    The numbers: loss, gradient norm, the loss scale if there is one; with ranks, whether one of them asks to stop,
    whether one is busy, the largest and the least of their digests. `by_rank`, called where there was trouble, has a
    row of each, which begins with its loss and gradient norm.
    """
    loss, grad_norm, *rest = numbers
    scale = rest.pop(0) if has_scale else None
    stop_asked, any_busy, most, least = rest or (0.0, 0.0, 0.0, 0.0)
    signal = _why_refused(loss, grad_norm, limits)
    overflowed = scale is not None and signal is Signal.NONFINITE_GRAD
    refused = None if overflowed else signal
    ranks = () if signal is None else _where_not_finite(by_rank())
    return Vitals(
        *(tick, step + (signal is None), signal is None, loss, grad_norm, lr, start, stop, refused, overflowed),
        *(scale, ranks),
        stop_asked=stop_asked > 0,
        any_busy=is_busy or any_busy > 0,
        alike=most == least,
        pace=pace,
    )


def _where_not_finite(by_rank: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The ranks that had trouble, without those that only received it; from the loss and gradient norm of each.

    A gradient that is not finite is on every rank once gradients were averaged, so the loss comes first.
    """
    for place in (0, 1):
        bad = tuple(rank for rank, row in enumerate(by_rank) if not math.isfinite(row[place]))
        if 0 < len(bad) < len(by_rank):
            return bad
    return ()


def _why_refused(loss: float, grad_norm: float, limits: tuple[float, float]) -> Signal | None:
    """Name what the gate refused an update for; None if it let it pass."""
    if not math.isfinite(loss):
        return Signal.NONFINITE_LOSS
    if not math.isfinite(grad_norm):
        return Signal.NONFINITE_GRAD
    if loss > limits[0]:
        return Signal.LOSS_SPIKE
    return Signal.GRAD_SPIKE if grad_norm > limits[1] else None


def all_finite(batches: Iterable[Any]) -> bool:
    """Look through batches of any shape. Called after trouble only: batches with a masked NaN are no trouble."""
    tensors = [leaf for leaf in leaves(list(batches)) if isinstance(leaf, torch.Tensor)]
    return all(bool(one.isfinite().all()) for one in tensors if one.is_floating_point() or one.is_complex())


def versions(batch: Any) -> list[int]:
    """Count what was written into the tensors of a batch so far, to notice what is written later."""
    return [leaf._version for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def mean(values: Sequence[torch.Tensor | float]) -> torch.Tensor:
    """Average over micro-batches."""
    device = next((value.device for value in values if isinstance(value, torch.Tensor)), None)
    return torch.stack([torch.as_tensor(value, dtype=torch.float32, device=device) for value in values]).mean()


def mean_metrics(reported: Sequence[Mapping[str, torch.Tensor | float]]) -> Mapping[str, torch.Tensor | float]:
    """Average what the micro-batches of an update reported, each name over those that have it."""
    if len(reported) < 2:
        return reported[0] if reported else {}
    names = sorted({name for one in reported for name in one})
    return {name: mean([one[name] for one in reported if name in one]) for name in names}


class Ranks(Protocol):
    """What reading metrics needs of the other processes."""

    def mean(self, vector: torch.Tensor) -> torch.Tensor:
        """Average over the ranks."""

    def union(self, names: Iterable[str]) -> list[str]:
        """Every name that any rank knows, in the same order everywhere."""


class MetricsLog:
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
        values, any_has_more = self._reduced(has_more=not self._newest.keys() <= set(self._names))
        if any_has_more:  # known to every rank, so all come here: a metric may appear on one rank alone
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
