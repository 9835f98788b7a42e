"""Clipping of gradients, and the one norm that it measures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm


@dataclass
class ClipConfig:
    max_norm: float | None = field(metadata={"above": 0})
    max_value: float | None = field(metadata={"above": 0})


@torch.no_grad()
def clip(
    weights: Iterable[torch.Tensor], config: ClipConfig, tightened: float = 1.0, usual: float | None = None
) -> tuple[torch.Tensor, float | None]:
    """Clip the gradients in place, by norm and then by value.

    Where no norm is configured a clip that was tightened takes the `usual` one for it. Returns the gradients' norm
    from before, and what it was clipped to if that can be said.
    """
    weights = [weight for weight in weights if weight.grad is not None]
    norm = get_total_norm([weight.grad for weight in weights if weight.grad is not None])
    configured = usual if config.max_norm is None and tightened < 1 else config.max_norm
    max_norm = None if configured is None else configured * tightened
    if max_norm is not None:
        clip_grads_with_norm_(weights, max_norm, norm)
    if config.max_value is not None:
        clip_grad_value_(weights, config.max_value * tightened)
    return norm, max_norm
