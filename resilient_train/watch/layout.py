"""Which tensors a run consists of, what they are called, and how many of them are measured at once.

Nothing here waits for the device. Which kernel is fast depends on it: the inf-norm of `_foreach_norm` is the best there
is on a GPU and takes 15 times as long as `aminmax` on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from operator import is_
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from resilient_train.state.sharded import is_sharded, largest_share, local_part
from resilient_train.watch.moments import ADAMS, Moment
from resilient_train.watch.weights import Weight

Item = TypeVar("Item")
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_MEASURED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
_COARSE = {torch.float16, torch.bfloat16}  # they round so roughly that sums of small changes are lost in them


def here(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has, as real numbers, never empty."""
    tensor = local_part(tensor) if is_sharded(tensor) else tensor
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor if tensor.numel() else tensor.new_zeros(1)


class Gauge(Generic[Item]):
    """A list of tensors that is measured again and again. All it returns are vectors with one value for each."""

    def __init__(self, named: Sequence[tuple[Item, Tensor]], device: torch.device) -> None:
        """`named` says of each tensor what it is, `device` is where the vectors are to be."""
        self.items = [item for item, _ in named]
        self.tensors, self.device = [tensor for _, tensor in named], device
        parts = [here(one) for one in self.tensors]
        self._is_plain = all(part is one for part, one in zip(parts, self.tensors, strict=True))
        self._is_uniform = len({(one.dtype, one.device) for one in parts}) == 1
        self._coarse = sum(one.dtype in _COARSE for one in parts)
        self._on_cpu = all(one.device.type == "cpu" for one in parts)

    def _parts(self) -> list[Tensor]:
        return self.tensors if self._is_plain else [here(one) for one in self.tensors]

    def lengths(self) -> Tensor:
        """The L2 norm of each. It overflows on large finite values."""
        parts = self._parts()
        if parts and not self._coarse:
            return self._row(torch._foreach_norm(parts, 2))
        if parts and self._coarse == len(parts):
            return self._row(torch._foreach_norm(parts, 2, dtype=torch.float32))
        return self._row([torch.linalg.vector_norm(one, dtype=_sum_dtype(one)) for one in parts])

    def largest(self) -> Tensor:
        """The largest absolute value of each; not finite if and only if one of its values is not."""
        parts = self._parts()
        if not self._on_cpu:
            return self._row(torch._foreach_norm(parts, float("inf")))
        ends = [torch.aminmax(one) for one in parts]
        return torch.maximum(self._row([high for _, high in ends]), -self._row([low for low, _ in ends]))

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
        if not scalars:
            return torch.zeros(0, device=self.device)
        if not self._is_uniform:
            scalars = [one.to(self.device, torch.float32, non_blocking=True) for one in scalars]
        return torch.stack(tuple(scalars)).to(self.device, torch.float32, non_blocking=True)


def _sum_dtype(tensor: Tensor) -> torch.dtype | None:
    return torch.float32 if tensor.dtype in _COARSE else None


class State(NamedTuple):
    """What is measured of the optimizers."""

    plain: Gauge[Moment]
    squares: Gauge[Moment]
    counts: Gauge[str]  # how often each of Adam's weights was updated
    found: list[Any]  # what it was made from


class Layout:
    """The weights, buffers and parameter groups of a run, in an order that is the same on every rank."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.model, self.optimizers = model, list(optimizers)
        self.skipped: list[str] = []  # not measured, being sparse or of a type without norms
        groups = self.groups()
        self.kinds = [kind_of(optimizer) for optimizer in optimizers for _ in optimizer.param_groups]
        self._size = [len(group["params"]) for group in groups]
        owner = {weight: number for number, group in enumerate(groups) for weight in group["params"]}
        self.names: dict[Tensor, str] = {weight: _plain(name) for name, weight in model.named_parameters()}
        named = [(self.names[weight], weight) for weight in model.parameters()]
        for number, group in enumerate(groups):
            for place, weight in enumerate(group["params"]):
                if weight not in self.names:
                    self.names[weight] = f"weight {place} of parameter group {number}"
                    named.append((self.names[weight], weight))
        named = [(name, weight) for name, weight in named if self._is_measured(name, weight)]
        named_modules = [(_plain(name), module) for name, module in model.named_modules()]
        self._own_buffers = [(f"{name}." if name else "", module._buffers) for name, module in named_modules]
        self._buffers: tuple[Gauge[str], list[Any]] | None = None  # and what it was made from
        self._state: State | None = None
        self.device = named[0][1].device if named else torch.device("cpu")
        self.weights = Gauge([(_weight(name, one, owner.get(one)), one) for name, one in named], self.device)
        self.is_whole = not any(is_sharded(weight) for _, weight in named)
        self.shares = 1 if self.is_whole else torch.distributed.get_world_size()

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, as they are now: loading a state replaces them."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def fits(self) -> bool:
        """Whether the optimizers still have the weights they had."""
        return [len(group["params"]) for group in self.groups()] == self._size

    def buffers(self) -> Gauge[str]:
        """Those that can be not finite; looked up again, since forwards may put others in their place."""
        found = [(prefix + name, one) for prefix, own in self._own_buffers if own for name, one in own.items()]
        tensors = [one for _, one in found if one is not None]
        if self._buffers is None or not _same(tensors, self._buffers[1]):
            named = [(f"buffer {name}", one) for name, one in found if one is not None]
            named = [(name, one) for name, one in named if self._is_measured(name, one)]
            self._buffers = Gauge(named, self.device), tensors
        return self._buffers[0]

    def moments(self) -> State:
        """Everything that the optimizers hold now. Its tensors are other ones after some ways of going back."""
        held = [one for optimizer in self.optimizers for one in list(optimizer.state.values())]
        found = [value for one in held if isinstance(one, dict) for value in one.values()]
        if self._state is None or not _same(found, self._state.found):
            self._state = self._sorted(found)
        return self._state

    def _sorted(self, found: list[Any]) -> State:
        """Sort the tensors of the optimizers' states by what they can be checked for."""
        kept: list[tuple[Moment, Tensor]] = []
        counts: list[tuple[str, Tensor]] = []
        places = [(optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups]
        for number, (optimizer, group) in enumerate(places):
            kind, state = kind_of(optimizer), optimizer.state
            for weight in group["params"]:
                for key, value in state[weight].items() if weight in state else ():
                    name = f"{key} of {self.names[weight]}"
                    if not isinstance(value, Tensor) or not self._is_measured(name, value):
                        continue
                    if kind in ADAMS and key == "step":
                        counts.append((name, value))
                    else:
                        kept.append((Moment(name, number, key, bool(kind), value.dtype in _COARSE), value))
        plain, squares = [one for one in kept if not one[0].is_square], [one for one in kept if one[0].is_square]
        gauges = Gauge(plain, self.device), Gauge(squares, self.device), Gauge(counts, self.device)
        return State(*gauges, found)

    def _is_measured(self, name: str, tensor: Tensor) -> bool:
        """Whether it is dense, real data of a type that has norms. One that could be not finite is noted if not."""
        is_number = tensor.is_floating_point() or tensor.is_complex()
        is_dense = not (is_lazy(tensor) or tensor.is_meta) and tensor.layout == torch.strided
        if is_dense and tensor.dtype in _MEASURED:
            return True
        if is_number and name not in self.skipped:
            self.skipped.append(name)
        return False


def kind_of(optimizer: Optimizer) -> str:
    """The name of one of torch's own optimizers; empty for any other, even one that is made from one of those."""
    own = type(optimizer)
    return own.__name__ if own.__module__.startswith("torch.optim.") else ""


def _weight(name: str, tensor: Tensor, group: int | None) -> Weight:
    count = max(1, largest_share(tensor) * (2 if tensor.is_complex() else 1))
    return Weight(name, group, sqrt(count), tensor.dtype in _COARSE)


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether it is the very same objects."""
    return len(some) == len(others) and all(map(is_, some, others))
