"""What is wrong with a state that no update can have made: which tensor, which element, or which epsilon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from resilient_train.events import Anomaly, Cause, Diagnosis, Signal


def of_state(
    anomaly: Anomaly, weights: Mapping[str, Tensor], before: Mapping[str, Tensor], optimizers: Sequence[Optimizer]
) -> Diagnosis | None:
    """Say what became of weights or moments; `before` are the weights of a proven state, if there is one."""
    if anomaly.signal in (Signal.NONFINITE_WEIGHTS, Signal.NONFINITE_OPTIMIZER) and (lost := lost_eps(optimizers)):
        return Diagnosis(Cause.OPTIMIZER, f"{lost}: raise it, or keep weights and moments in float32.")
    if anomaly.signal is Signal.NONFINITE_WEIGHTS:
        where = _first_nonfinite(weights)
    elif anomaly.signal is Signal.WEIGHTS_JUMP:
        where = _farthest(weights, before)
    else:
        return None
    if where is None:
        return None
    if "lately" in anomaly.evidence:  # nothing proves that no update has done it
        why = "farther than updates went lately: if it returns, lower the learning rate, or suspect the hardware"
    else:
        why = "which no update can have done: if it returns, suspect the hardware"
    return Diagnosis(Cause.CORRUPTION, f"{where}, {why}, or code that writes to weights between updates.")


def lost_eps(optimizers: Iterable[Optimizer]) -> str | None:
    """Name an epsilon that is 0 in the type of the weights, so that an update may divide by zero."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if not isinstance(eps, float):
                continue
            for dtype in {weight.dtype for weight in group["params"] if weight.is_floating_point()}:
                if torch.tensor(eps, dtype=dtype).item() == 0:
                    return f"eps={eps:g} of {type(optimizer).__name__} is 0 in {str(dtype).removeprefix('torch.')}"
    return None


@torch.no_grad()
def _first_nonfinite(weights: Mapping[str, Tensor]) -> str | None:
    for name, weight in weights.items():
        if weight.is_floating_point() and not bool(weight.isfinite().all()):
            place = (~weight.isfinite()).nonzero()[0].tolist()
            return f"`{name}` is {float(weight[tuple(place)]):g} at {place}"
    return None


@torch.no_grad()
def _farthest(weights: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> str | None:
    """The element that is farthest from where it was."""
    farthest, told = 0.0, None
    for name, weight in weights.items():
        was = before.get(name)
        if was is None or was.shape != weight.shape or not weight.is_floating_point() or not weight.numel():
            continue
        moved = (weight - was.to(weight.device)).abs().flatten()
        far, place = moved.max(dim=0)
        if float(far) > farthest:
            index = [int(one) for one in torch.unravel_index(place, weight.shape)]
            farthest = float(far)
            told = f"`{name}` went from {float(was[tuple(index)]):.3g} to {float(weight[tuple(index)]):.3g} at {index}"
    return told
