"""The tensors of a run, and measurements of many of them at once. Nothing here waits for the device.

The inf-norm of `_foreach_norm` is the fastest on a GPU; on a CPU it takes 15 times as long as `aminmax`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import inf, nan
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from resilient_train.core.tree import Tree, is_sharded, local_part
from resilient_train.data.trees import sorted_leaves
from resilient_train.extensions.scans.weights import KEPT, SQUARES, Watched

_MEASURED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
_DIGEST_FACTOR = -7046029254386353131  # 0x9E3779B97F4A7C15: odd, and its multiples are spread well
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size of an element


def _here(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process has, as real numbers, never empty."""
    tensor = local_part(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor if tensor.numel() else tensor.new_zeros(1)


def measured(
    how: Callable[[list[Tensor]], Sequence[Tensor]], tensors: Iterable[Tensor], device: torch.device
) -> Tensor:
    """Return one number of each tensor. Neighbours of one kind are measured together, which takes a few kernels."""
    kinds = groupby(map(_here, tensors), key=lambda part: (part.dtype, part.device))
    rows = [torch.stack(tuple(how([*parts]))).to(device, torch.float32, non_blocking=True) for _, parts in kinds]
    return torch.cat(rows) if rows else torch.zeros(0, device=device)


def largest(parts: list[Tensor]) -> Sequence[Tensor]:
    """The largest absolute value of each; not finite if and only if one of its values is not."""
    if parts[0].device.type != "cpu":
        return torch._foreach_norm(parts, inf)
    lows, highs = zip(*map(torch.aminmax, parts), strict=True)
    return torch.maximum(torch.stack(highs), -torch.stack(lows)).unbind()


# One more number of some tensors.
TOTALS: dict[str, Callable[[list[Tensor]], Sequence[Tensor]]] = {
    "sum": lambda parts: [one.sum(dtype=torch.float32) for one in parts],
    "length": torch._foreach_norm,
}


class Layout:
    """The tensors of a run, in an order that is the same on every rank. They are looked up again each time: forwards,
    rewinds and loops replace them.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.model, self.optimizers = model, list(optimizers)
        weights = [*model.parameters(), *(weight for group in self.groups() for weight in group["params"])]
        self.device = weights[0].device if weights else torch.device("cpu")
        self.is_whole = not any(map(is_sharded, weights))
        self.shares = 1 if self.is_whole else torch.distributed.get_world_size()

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, as they are now: loading a state replaces them."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def kinds(self) -> list[str]:
        """The optimizer of each group, if it is torch's own; no bound holds where float16 makes small squares 0."""
        return [
            "" if any(weight.dtype is torch.float16 for weight in group["params"]) else kind_of(optimizer)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]

    def tensors(self, scans: Collection[str], kept: Mapping[str, Tree]) -> list[tuple[Watched, Tensor]]:
        """What these scans look at; tensors of a kind one after the other."""
        found: list[tuple[Watched, Any]] = []
        if "weights" in scans:
            found += self._weights()
            for name, one in self.model.named_buffers():
                found.append((Watched("weights", f"buffer {name}", is_free=True), one))
            found.append((Watched("weights", KEPT, is_free=True), self._kept(kept)))
        if "optimizer" in scans:
            found += self._moments()
        if "norms" in scans:
            for name, module in self.model.named_modules():
                if isinstance(module, _BatchNorm) and module.track_running_stats:
                    mean, var = cast(Tensor, module.running_mean), cast(Tensor, module.running_var)
                    sizes = torch.cat([mean, var.abs().sqrt()])  # no squares, which overflow
                    found.append((Watched("norms", name, is_free=True), sizes))
        dense = [(one, tensor) for one, tensor in found if _is_measured(tensor)]
        return sorted(dense, key=lambda each: (str(each[1].dtype), each[1].device.type))

    def _weights(self) -> Iterator[tuple[Watched, Any]]:
        owner = {weight: number for number, group in enumerate(self.groups()) for weight in group["params"]}
        kinds = self.kinds()
        for weight, name in self._names().items():
            group = owner.get(weight)
            total = "length" if group is not None and kinds[group] == "SGD" else ""  # for which its bound holds, too
            yield Watched("weights", name, group, is_weight=True, total=total, is_free=group is None), weight

    def _names(self) -> dict[Tensor, str]:
        names: dict[Tensor, str] = {weight: name for name, weight in self.model.named_parameters()}
        for number, group in enumerate(self.groups()):  # weights that the model does not have
            for place, weight in enumerate(group["params"]):
                names.setdefault(weight, f"weight {place} of parameter group {number}")
        return names

    def _kept(self, kept: Mapping[str, Tree]) -> Tensor:
        """One number of all that the user keeps, NaN or 0: on each rank it may be something else."""
        sizes = measured(largest, (one for _, one in sorted_leaves(kept) if _is_measured(one)), self.device)
        return torch.where(sizes.isnan().any(), nan, 0.0)

    def _moments(self) -> Iterator[tuple[Watched, Any]]:
        names, number = self._names(), 0
        for optimizer in self.optimizers:
            is_own = not kind_of(optimizer)  # torch does not know what its keys mean
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    for key, value in optimizer.state.get(weight, {}).items():
                        name, total = f"{key} of {names[weight]}", "sum" if key in SQUARES and not is_own else ""
                        yield Watched("optimizer", name, number, total=total, is_free=is_own), value
                number += 1


def _is_measured(value: Any) -> bool:
    """Whether it is a dense tensor of a type that has norms."""
    if not isinstance(value, Tensor) or is_lazy(value) or value.is_meta:
        return False
    return value.layout == torch.strided and value.dtype in _MEASURED


def kind_of(optimizer: Optimizer) -> str:
    own = type(optimizer)
    return own.__name__ if own.__module__.startswith("torch.optim.") else ""


def digest(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return one 64-bit integer on `device`, which differs if a bit of the tensors does: a sum of the bits of each
    tensor as integers, which neither round nor depend on an order, and of these with odd factors.
    """
    sums = []
    for tensor in tensors:
        bits = _here(tensor.detach())
        bits = bits.view(_WHOLE[bits.element_size()])
        sums.append(bits.sum(dtype=torch.int64).to(device, non_blocking=True))
    row = torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)
    return (row * torch.arange(1, 2 * len(row), 2, device=device).mul_(_DIGEST_FACTOR)).sum()  # odd times odd
