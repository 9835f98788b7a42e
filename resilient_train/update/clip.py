"""Clipping of gradients, and the norm that it measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.utils import clip_grad_value_, get_total_norm

from resilient_train.state.sharded import is_sharded, local_part, sharding_of

_COARSE = (torch.float16, torch.bfloat16)


@dataclass
class ClipConfig:
    max_norm: float | None = field(metadata={"above": 0})
    max_value: float | None = field(metadata={"above": 0})


@torch.no_grad()
def clip(
    weights: Sequence[torch.Tensor],
    config: ClipConfig,
    tightened: float = 1.0,
    usual: float | None = None,
    over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, float | None]:
    """Clip the gradients in place, by norm and then by value.

    Where no norm is configured, a tightened clip starts from the `usual` one. Returns the norm of the gradients
    before, and what they were clipped to, if anything. `over_ranks` sums over the ranks where gradients are sharded.
    """
    grads = [weight.grad for weight in weights if weight.grad is not None]
    plain, has_sparse = is_plain(grads), False
    if not plain and (has_sparse := any(grad.is_sparse for grad in grads)):
        grads = _values(weights)
        plain = is_plain(grads)
    if over_ranks is None:
        norm = total_norm(grads, plain=plain)
    else:
        norm, grads = norm_over_ranks(grads, over_ranks), [local_part(grad) for grad in grads]
    configured = usual if config.max_norm is None and tightened < 1 else config.max_norm
    max_norm = None if configured is None else configured * tightened
    if max_norm is not None:
        factor = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
        if plain and factor.dtype is grads[0].dtype:
            torch._foreach_mul_(grads, factor)
        else:
            for grad in grads:
                grad.mul_(factor.to(grad.device))
    if config.max_value is not None:
        max_value = config.max_value * tightened
        if has_sparse or over_ranks is not None:
            for grad in grads:
                grad.clamp_(-max_value, max_value)
        else:
            clip_grad_value_(weights, max_value)
    return norm, max_norm


def total_norm(grads: list[torch.Tensor], *, plain: bool) -> torch.Tensor:
    """The norm of all gradients together. Torch's own sorts them by device and type first, which costs as much.

    It is infinite where a gradient is, and not where a square alone is too large for float32. Doubles cost nothing on
    a GPU, which waits for its memory. On a CPU they take three times as long: there only the last sum is in doubles.
    """
    if not plain:
        return get_total_norm(grads)
    first = grads[0]
    if first.device.type == "cpu":
        norms = torch._foreach_norm(grads, 2, dtype=torch.float32 if first.dtype in _COARSE else None)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), dtype=torch.float64)
    else:
        doubles = None if first.device.type == "mps" else torch.float64
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, dtype=doubles)))
    return total.to(_at_least_float32(first.dtype))


def norm_over_ranks(grads: list[torch.Tensor], over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The norm of sharded gradients: one number from each rank, and nothing is gathered."""
    dtype = _at_least_float32(grads[0].dtype)
    wide = torch.float64 if grads[0].device.type != "mps" else None
    squares = torch.zeros((), dtype=wide, device=grads[0].device)
    for grad in grads:
        if (share := local_part(grad)).numel():
            squares += torch.linalg.vector_norm(share, dtype=wide).square() / _holders(grad)
    return over_ranks(squares).sqrt().to(dtype)


def _holders(grad: torch.Tensor) -> int:
    """How many ranks hold the same share: all of them, of what is not sharded."""
    if not is_sharded(grad):
        return torch.distributed.get_world_size()
    spread, count = sharding_of(grad), 1
    for size, placement in zip(spread.mesh.shape, spread.placements, strict=True):
        count *= size if placement.is_replicate() else 1
    return count


def is_plain(grads: list[torch.Tensor]) -> bool:
    """Say whether all are dense tensors of one type in one place."""
    first = grads[0] if grads else None
    return first is not None and all(
        type(grad) is torch.Tensor and grad.dtype is first.dtype and grad.device == first.device and not grad.is_sparse
        for grad in grads
    )


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _COARSE else dtype


def _values(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients; of sparse ones their values, after rows that occur twice are added up."""
    values = []
    for weight in weights:
        if weight.grad is not None and weight.grad.is_sparse:
            weight.grad = weight.grad.coalesce()
            values.append(weight.grad._values())  # shared: the public one is a copy
        elif weight.grad is not None:
            values.append(weight.grad)
    return values
