"""What is measured of many tensors at once, without waiting for the device.

Which kernel is fast depends on the device: the inf-norm of `_foreach_norm` is the best there is on a GPU and takes 15
times as long as `aminmax` on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from resilient_train.state.sharded import is_sharded, local_part
from resilient_train.state.tree import leaves

_MEASURED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
_COARSE = {torch.float16, torch.bfloat16}
_INF = float("inf")


def is_measurable(tensor: Tensor) -> bool:
    """Dense, real data of a type that has norms."""
    if is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided:
        return False
    return tensor.dtype in _MEASURED


def is_number(tensor: Tensor) -> bool:
    """Whether a non-finite value can be in it at all."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_coarse(tensor: Tensor) -> bool:
    """Whether it rounds so roughly that sums of small changes are lost in it."""
    return tensor.dtype in _COARSE


def here(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, as real numbers, never empty."""
    tensor = local_part(tensor) if is_sharded(tensor) else tensor
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor if tensor.numel() else tensor.new_zeros(1)


class Gauge:
    """A list of tensors that is measured again and again. All it finds are vectors with one value for each."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """`device` is where the vectors are wanted."""
        self.tensors, self.device = list(tensors), device
        parts = [here(one) for one in self.tensors]
        self._is_plain = all(part is one for part, one in zip(parts, self.tensors, strict=True))
        self._is_uniform = len({(one.dtype, one.device) for one in parts}) == 1
        self._coarse = sum(map(is_coarse, parts))
        self._on_cpu = all(one.device.type == "cpu" for one in parts)

    def _parts(self) -> list[Tensor]:
        return self.tensors if self._is_plain else [here(one) for one in self.tensors]

    def lengths(self) -> Tensor:
        """The L2 norm of each. It overflows on large finite values."""
        parts = self._parts()
        if not self._coarse:
            return self._row(torch._foreach_norm(parts, 2))
        if self._coarse == len(parts):
            return self._row(torch._foreach_norm(parts, 2, dtype=torch.float32))
        return self._row([torch.linalg.vector_norm(one, dtype=_sum_dtype(one)) for one in parts])

    def largest(self) -> Tensor:
        """The largest absolute value of each; not finite if and only if one of its values is not."""
        parts = self._parts()
        if not self._on_cpu:
            return self._row(torch._foreach_norm(parts, _INF))
        lows, highs = zip(*map(torch.aminmax, parts), strict=True)
        return torch.maximum(self._row(highs), -self._row(lows))

    def sums(self) -> Tensor:
        """The sum of each."""
        return self._row([one.sum(dtype=_sum_dtype(one)) for one in self._parts()])

    def depths(self) -> Tensor:
        """How far each goes below zero, as a positive number, because ranks keep the largest of theirs."""
        return -self._row([one.amin() for one in self._parts()])

    def values(self) -> Tensor:
        """The value of each, where each has only one."""
        return self._row([one.reshape(()) for one in self._parts()])

    def _row(self, scalars: Sequence[Tensor]) -> Tensor:
        if not self._is_uniform:
            scalars = [one.to(self.device, torch.float32, non_blocking=True) for one in scalars]
        return torch.stack(tuple(scalars)).to(self.device, torch.float32, non_blocking=True)


def _sum_dtype(tensor: Tensor) -> torch.dtype | None:
    return torch.float32 if is_coarse(tensor) else None


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors of numbers in nested dicts, lists and tuples."""
    return [one for one in leaves(tree) if isinstance(one, Tensor) and is_number(one) and is_measurable(one)]
