"""What is wrong with weights or moments: which of them is not finite, or went farthest from where it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

import torch
from torch import Tensor
from torch.optim import Optimizer

from resilient_train.state.tree import Share, is_sharded, local_part, sharding_of
from resilient_train.types import Anomaly, Cause, Diagnosis, Signal
from resilient_train.wording import names_listed


def of_state(
    anomaly: Anomaly,
    weights: Mapping[str, Tensor],
    before: Mapping[str, Tensor | Share],
    optimizers: Sequence[Optimizer],
) -> tuple[float, Diagnosis] | None:
    """Say what is wrong on this rank, and how bad it is; `before` are weights of a verified state, if there is one."""
    if anomaly.signal in (Signal.NONFINITE_WEIGHTS, Signal.NONFINITE_OPTIMIZER) and (lost := lost_eps(optimizers)):
        return inf, Diagnosis(Cause.OPTIMIZER, f"{lost}: raise it, or keep weights and moments in float32.")
    where: tuple[float, str] | None = None
    if anomaly.signal is Signal.NONFINITE_WEIGHTS:
        where = first_nonfinite(weights)
    elif anomaly.signal is Signal.WEIGHTS_JUMP:
        where = _farthest(weights, before)
    if where is None:
        return None
    size, what = where
    advice = (
        f"{what}, which no update can have done: expect=[{anomaly.step}] declares it if it is meant; if it returns, "
        "suspect the hardware, or code that writes to weights between updates."
    )
    return size, Diagnosis(Cause.CORRUPTION, advice)


def lost_eps(optimizers: Iterable[Optimizer]) -> str | None:
    """Name an epsilon that is 0 in the type of the weights, so that an update may divide by zero."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if not isinstance(eps, int | float):
                continue
            for dtype in {weight.dtype for weight in group["params"] if weight.is_floating_point()}:
                if torch.tensor(eps, dtype=dtype).item() == 0:
                    return f"eps={eps:g} of {type(optimizer).__name__} is 0 in {str(dtype).removeprefix('torch.')}"
    return None


@torch.no_grad()
def first_nonfinite(weights: Mapping[str, Tensor]) -> tuple[float, str] | None:
    parts = [(name, local_part(whole)) for name, whole in weights.items()]
    broken = [(name, one) for name, one in parts if one.is_floating_point() and not bool(one.isfinite().all())]
    if not broken:
        return None
    name, weight = broken[0]
    place = (~weight.isfinite()).nonzero()[0].tolist()
    found = f"`{name}` is {float(weight[tuple(place)]):g} at {_in_whole(place, weights[name])}"
    if len(broken) > 1:
        names = names_listed([one for one, _ in broken])
        found += f" ({len(broken):,} of {len(parts):,} weights are not finite: {names})"
    return inf, found


@torch.no_grad()
def _farthest(weights: Mapping[str, Tensor], before: Mapping[str, Tensor | Share]) -> tuple[float, str] | None:
    farthest, found = 0.0, None
    for name, whole in weights.items():
        if (kept := before.get(name)) is None:
            continue
        weight, was = local_part(whole), local_part(kept)
        if was.shape != weight.shape or not weight.is_floating_point() or not weight.numel():
            continue
        moved = (weight - was.to(weight.device)).abs().flatten()
        far, place = moved.max(dim=0)
        if float(far) > farthest:
            index = [int(one) for one in torch.unravel_index(place, weight.shape)]
            farthest = float(far)
            values = f"from {float(was[tuple(index)]):.3g} to {float(weight[tuple(index)]):.3g}"
            found = farthest, f"`{name}` went {values} at {_in_whole(index, whole)}"
    return found


def _in_whole(place: Sequence[int], whole: Tensor) -> list[int]:
    """Where an element of this rank's share lies in the whole."""
    if not is_sharded(whole):
        return list(place)
    return [at + start for at, (start, _) in zip(place, sharding_of(whole).box(), strict=True)]
