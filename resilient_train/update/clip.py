"""Clipping of gradients, and the one norm that it measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.utils import clip_grad_value_, get_total_norm


@dataclass
class ClipConfig:
    max_norm: float | None = field(metadata={"above": 0})
    max_value: float | None = field(metadata={"above": 0})


@torch.no_grad()
def clip(
    weights: Sequence[torch.Tensor], config: ClipConfig, tightened: float = 1.0, usual: float | None = None
) -> tuple[torch.Tensor, float | None]:
    """Clip the gradients in place, by norm and then by value.

    Where no norm is configured a clip that was tightened takes the `usual` one for it. Returns the gradients' norm
    from before, and what it was clipped to if that can be said.
    """
    grads = [weight.grad for weight in weights if weight.grad is not None]
    norm = total_norm(grads)
    configured = usual if config.max_norm is None and tightened < 1 else config.max_norm
    max_norm = None if configured is None else configured * tightened
    if max_norm is not None:
        factor = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
        if is_plain(grads):
            torch._foreach_mul_(grads, factor)
        else:
            for grad in grads:
                grad.mul_(factor.to(grad.device))
    if config.max_value is not None:
        clip_grad_value_(weights, config.max_value * tightened)
    return norm, max_norm


def total_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients together. Torch's own sorts them by device and type first, which costs as much."""
    if is_plain(grads):
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        return norm
    return get_total_norm(grads)


def is_plain(grads: list[torch.Tensor]) -> bool:
    """Say whether all are dense tensors of one type in one place."""
    first = grads[0] if grads else None
    return first is not None and all(
        type(grad) is torch.Tensor and grad.dtype is first.dtype and grad.device == first.device and not grad.is_sparse
        for grad in grads
    )
