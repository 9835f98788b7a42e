"""What one update measured, from the device's numbers to vitals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from resilient_train.state.tree import leaves
from resilient_train.types import Signal, Vitals


def vitals(
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
    whether one is busy, the largest and the least of their digests. `by_rank`, asked where there was trouble, has a
    row of each, which begins with its loss and gradient norm.
    """
    loss, grad_norm, *rest = numbers
    scale = rest.pop(0) if has_scale else None
    stop_asked, any_busy, most, least = rest or (0.0, 0.0, 0.0, 0.0)
    signal = why_refused(loss, grad_norm, limits)
    overflowed = scale is not None and signal is Signal.NONFINITE_GRAD
    refused = None if overflowed else signal
    ranks = () if signal is None else where_not_finite(by_rank())
    return Vitals(
        *(tick, step + (signal is None), signal is None, loss, grad_norm, lr, start, stop, refused, overflowed),
        *(scale, ranks),
        stop_asked=stop_asked > 0,
        any_busy=is_busy or any_busy > 0,
        alike=most == least,
        pace=pace,
    )


def where_not_finite(by_rank: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Tell the ranks that had trouble from those that only heard of it, by the loss and gradient norm of each.

    A gradient that is not finite is on every rank once gradients were averaged, so a loss tells more.
    """
    for place in (0, 1):
        bad = tuple(rank for rank, row in enumerate(by_rank) if not math.isfinite(row[place]))
        if 0 < len(bad) < len(by_rank):
            return bad
    return ()


def why_refused(loss: float, grad_norm: float, limits: tuple[float, float]) -> Signal | None:
    """Name what the gate refused an update for; None if it let it pass."""
    if not math.isfinite(loss):
        return Signal.NONFINITE_LOSS
    if not math.isfinite(grad_norm):
        return Signal.NONFINITE_GRAD
    if loss > limits[0]:
        return Signal.LOSS_SPIKE
    return Signal.GRAD_SPIKE if grad_norm > limits[1] else None


def all_finite(batches: Iterable[Any]) -> bool:
    """Look through batches of any shape. Asked after trouble only: batches with a masked NaN are no trouble."""
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
