"""What is wrong with weights or moments: which of them is not finite, or went farthest from where it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from resilient_train.state.tree import Share, is_sharded, local_part, sharding_of
from resilient_train.types import Anomaly, Cause, Diagnosis, Facts, Signal, fact


def of_state(
    anomaly: Anomaly,
    weights: Mapping[str, Tensor],
    before: Mapping[str, Tensor | Share],
    optimizers: Sequence[Optimizer],
) -> tuple[float, Diagnosis] | None:
    """Say what is wrong on this rank, and how bad it is; `before` are weights of a verified state, if there is one."""
    if anomaly.signal in (Signal.NONFINITE_WEIGHTS, Signal.NONFINITE_OPTIMIZER) and (lost := lost_eps(optimizers)):
        return inf, Diagnosis(Cause.OPTIMIZER, lost)
    if anomaly.signal is Signal.NONFINITE_WEIGHTS and (found := first_nonfinite(weights)) is not None:
        return inf, Diagnosis(Cause.CORRUPTION, fact("weight_not_finite", **found, step=anomaly.step))
    if anomaly.signal is Signal.WEIGHTS_JUMP and (moved := _farthest(weights, before)) is not None:
        far, found = moved
        return far, Diagnosis(Cause.CORRUPTION, fact("weight_moved", **found, step=anomaly.step))
    return None


def lost_eps(optimizers: Iterable[Optimizer]) -> Facts | None:
    """Name an epsilon that is 0 in the type of the weights, so that an update may divide by zero."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if not isinstance(eps, int | float):
                continue
            for dtype in {weight.dtype for weight in group["params"] if weight.is_floating_point()}:
                if torch.tensor(eps, dtype=dtype).item() == 0:
                    name = str(dtype).removeprefix("torch.")
                    return fact("eps_lost", eps=eps, optimizer=type(optimizer).__name__, dtype=name)
    return None


@torch.no_grad()
def first_nonfinite(weights: Mapping[str, Tensor]) -> dict[str, Any] | None:
    parts = {name: local_part(whole) for name, whole in weights.items()}
    broken = [name for name, one in parts.items() if one.is_floating_point() and not bool(one.isfinite().all())]
    if not broken:
        return None
    weight, whole = parts[broken[0]], weights[broken[0]]
    place = (~weight.isfinite()).nonzero()[0].tolist()
    counts = {"names": broken, "bad": len(broken), "count": len(parts), "more": len(broken) - 1}
    return {"name": broken[0], "value": float(weight[tuple(place)]), "at": _in_whole(place, whole), **counts}


@torch.no_grad()
def _farthest(
    weights: Mapping[str, Tensor], before: Mapping[str, Tensor | Share]
) -> tuple[float, dict[str, Any]] | None:
    farthest, found = 0.0, None
    for name in filter(before.__contains__, weights):
        weight, was = local_part(weights[name]), local_part(before[name])
        if was.shape != weight.shape or not weight.is_floating_point() or not weight.numel():
            continue
        far, flat = (weight - was.to(weight.device)).abs().flatten().max(dim=0)
        if float(far) > farthest:
            farthest, place = float(far), [int(one) for one in torch.unravel_index(flat, weight.shape)]
            values = {"before": float(was[tuple(place)]), "now": float(weight[tuple(place)])}
            found = farthest, {"name": name, "at": _in_whole(place, weights[name]), **values}
    return found


def _in_whole(place: Sequence[int], whole: Tensor) -> list[int]:
    """Where an element of this rank's share lies in the whole."""
    if not is_sharded(whole):
        return list(place)
    return [at + start for at, (start, _) in zip(place, sharding_of(whole).box(), strict=True)]
