"""A digest of what every rank has a replica of: one number a rank, exact to the bit, computed where the tensors lie.

A flipped bit that no other scan can see is still a difference. Bits are added up as whole numbers, which neither round
nor depend on an order; sums that leave their range wrap around, and each place has an odd factor of its own: so no
single change can hide, and two of them only where they cancel in the same one of many columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from resilient_train.watch.config import ReplicasConfig
from resilient_train.watch.layout import Layout, here

_COLUMNS, _ROWS = 1024, 8  # what is larger is added up in so many columns first
_FACTOR = -7046029254386353131  # 0x9E3779B97F4A7C15: odd, and its multiples are well spread
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size of an element


class Replicas:
    """Weights, and moments where torch keeps them: with the same gradients they stay the same on all ranks.

    Buffers are left out: those of BatchNorm differ. So are weights of which a rank holds a part, and those that the
    replication is configured to ignore.
    """

    def __init__(self, config: ReplicasConfig, ignored: Collection[str] | None) -> None:
        """`ignored` are the names of weights that are no replicas; None: there are no replicas at all."""
        self.every = 0 if ignored is None else config.every
        self._ignored = frozenset(ignored or ())
        self.clean_step = 0

    def is_due(self, step: int) -> bool:
        """Say whether the state after `step` accepted updates is to be compared."""
        return self.every > 0 and step > 0 and step % self.every == 0

    @torch.no_grad()
    def measure(self, layout: Layout) -> Tensor:
        """The digest of this rank's, and its complement: the largest of both over all ranks show whether all agree."""
        found = digest((tensor for _, tensor in self._held(layout)), layout.device)
        return torch.stack([found, ~found])

    def judge(self, step: int, largest: Sequence[int]) -> bool:
        """Say whether all ranks were equal at `step`."""
        is_equal = largest[0] == ~largest[1]
        if is_equal:
            self.clean_step = step
        return is_equal

    @torch.no_grad()
    def each(self, layout: Layout) -> tuple[list[str], Tensor]:
        """The names of all tensors, and the digest of each: for after trouble."""
        held = list(self._held(layout))
        digests = [digest([tensor], layout.device) for _, tensor in held]
        return [name for name, _ in held], torch.stack(digests) if digests else torch.zeros(0, dtype=torch.int64)

    def _held(self, layout: Layout) -> Iterable[tuple[str, Tensor]]:
        if not layout.is_whole:
            return
        for weight, tensor in zip(layout.weights.items, layout.weights.tensors, strict=True):
            if weight.name not in self._ignored:
                yield weight.name, tensor
        for gauge in layout.moments()[:2]:
            for moment, tensor in zip(gauge.items, gauge.tensors, strict=True):
                is_ignored = any(moment.name.endswith(f" of {name}") for name in self._ignored)
                if moment.by_torch and not is_ignored:
                    yield moment.name, tensor


def digest(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """One whole number of 64 bits on `device`, without waiting for it."""
    parts = [part for tensor in tensors for part in _parts(tensor)]
    if not parts:
        return torch.zeros((), dtype=torch.int64, device=device)
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for part in parts:
        by_type.setdefault(part.dtype, []).append(part.to(device, non_blocking=True))
    row = torch.cat([torch.cat(some).long() for some in by_type.values()])
    factors = torch.arange(1, 2 * len(row), 2, device=device).mul_(_FACTOR)  # odd times odd
    return (row * factors).sum()


def _parts(tensor: Tensor) -> list[Tensor]:
    """The bits of a tensor in a few whole numbers: the sums of columns, and what is left over."""
    real = here(tensor.detach())
    whole = _WHOLE[real.element_size()]
    bits = real.view(whole).flatten()  # a copy only where it is not contiguous
    rows = len(bits) // _COLUMNS
    if rows < _ROWS:
        return [bits]
    inside = rows * _COLUMNS
    return [bits[:inside].view(rows, _COLUMNS).sum(0, dtype=whole), bits[inside:]]
