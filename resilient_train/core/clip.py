"""Clipping of gradients, and the norm that it measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.utils import get_total_norm

from resilient_train.core.tree import local_part
from resilient_train.ground.reader import ClipConfig

_COARSE = (torch.float16, torch.bfloat16)
OverRanks = Callable[[list[torch.Tensor]], torch.Tensor]  # the norm of tensors that ranks have shares of


@torch.no_grad()
def clip(
    weights: Sequence[torch.Tensor],
    max_norm: float | None = None,
    max_value: float | None = None,
    over_ranks: OverRanks | None = None,
) -> torch.Tensor:
    """Clip the gradients in place, by norm and then by value. Returns the norm from before.

    `over_ranks` measures sharded gradients.
    """
    grads = gradients(weights)
    is_plain = _is_plain(grads)
    norm = _total_norm(grads) if is_plain and over_ranks is None else norm_of(grads, over_ranks)
    if over_ranks is not None:
        grads = [local_part(grad) for grad in grads]
    if max_norm is not None:
        factor = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
        is_within = factor.is_cpu and factor.item() == 1.0  # not asked on a device: the host would wait for it
        if is_plain and factor.dtype is grads[0].dtype and not is_within:
            torch._foreach_mul_(grads, factor)
        elif not is_within:
            scale(grads, factor)
    if max_value is not None and grads:
        torch._foreach_clamp_min_(grads, -max_value)
        torch._foreach_clamp_max_(grads, max_value)
    return norm


class Clipper:
    def __init__(self, config: ClipConfig, over_ranks: OverRanks | None = None) -> None:
        """`over_ranks` is where weights are sharded."""
        self.config, self.over_ranks = config, over_ranks
        self.is_by_norm = config.max_value is None  # the norm after clipping follows from the one before
        self.changes: list[Callable[[Sequence[torch.Tensor]], None]] = []  # of gradients before that, as in a drill

    def clip(self, weights: Sequence[torch.Tensor], max_norm: float | None, factor: float) -> torch.Tensor:
        """Clip by norm, then by the configured value times `factor`. Returns the norm from before."""
        for change in self.changes:
            change(weights)
        return self._clipped(weights, max_norm, factor)

    def _clipped(self, weights: Sequence[torch.Tensor], max_norm: float | None, factor: float) -> torch.Tensor:
        max_value = None if self.config.max_value is None else self.config.max_value * factor
        return clip(weights, max_norm, max_value, self.over_ranks)


def norm_limit(configured: float | None, tightened: float, usual: float | None) -> float | None:
    """Return the norm to clip to: a share of the configured, else of the `usual` one."""
    begins = usual if configured is None and tightened < 1 else configured
    return None if begins is None else begins * tightened


def gradients(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients: of sparse ones the values, after rows that occur twice were added up."""
    grads: list[torch.Tensor] = []
    for weight in weights:
        if (grad := weight.grad) is not None:
            if grad.is_sparse:
                weight.grad = grad = grad.coalesce()
                grad = grad._values()  # shared: the public method copies
            grads.append(grad)
    return grads


def scale(grads: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    for grad in grads:
        local_part(grad).mul_(factor.to(grad.device))


def norm_of(tensors: list[torch.Tensor], over_ranks: OverRanks | None) -> torch.Tensor:
    if over_ranks is not None:
        return over_ranks(tensors)
    return _total_norm(tensors) if _is_plain(tensors) else get_total_norm(tensors)


def _is_plain(tensors: Sequence[torch.Tensor]) -> bool:
    return bool(tensors) and all(
        type(one) is torch.Tensor and one.dtype is tensors[0].dtype and one.device == tensors[0].device
        for one in tensors
    )


def _total_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of dense gradients of one type on one device. Torch's function would sort them at the same cost.

    It is infinite where a gradient is. On a GPU it is finite where only a square is too large for float32: doubles cost
    nothing there. On a CPU they take three times as long, so only the last sum is in doubles.
    """
    first = grads[0]
    if first.device.type == "cpu":
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32 if first.dtype in _COARSE else None))
        total: torch.Tensor = torch.linalg.vector_norm(norms, dtype=torch.float64)
    else:
        doubles = None if first.device.type == "mps" else torch.float64
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=doubles))
        total = torch.linalg.vector_norm(norms)
    return total.to(torch.float32 if first.dtype in _COARSE else first.dtype)
