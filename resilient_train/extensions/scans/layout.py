"""The tensors of a run, and measurements of many of them at once. Nothing here waits for the device.

The inf-norm of `_foreach_norm` is the fastest on a GPU; on a CPU it takes 15 times as long as `aminmax`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, sqrt
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from resilient_train.core.tree import Tree, is_sharded, local_part, sharding_of
from resilient_train.data.trees import sorted_leaves
from resilient_train.extensions.scans.weights import Moment, Weight
from resilient_train.ground.types import Facts, fact

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_MEASURED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
_COARSE = {torch.float16, torch.bfloat16}  # they round so roughly that sums of small changes are lost in them
_DIGEST_COLUMNS, _DIGEST_ROWS = 1024, 8  # a tensor of more rows than that is first added up along its columns
_DIGEST_FACTOR = -7046029254386353131  # 0x9E3779B97F4A7C15: odd, and its multiples are spread well
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size of an element


def _here(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process has, as real numbers, never empty."""
    tensor = local_part(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor if tensor.numel() else tensor.new_zeros(1)


class Gauge:
    """Measures a list of tensors, again and again. Each measurement is a vector with one value for each tensor."""

    def __init__(self, named: Sequence[tuple[Any, Tensor]], device: torch.device) -> None:
        self.items = [item for item, _ in named]
        self.tensors, self.device = [tensor for _, tensor in named], device
        self._are_plain = not any(is_sharded(one) or one.is_complex() or not one.numel() for one in self.tensors)
        self._is_uniform = self._are_plain and len({(one.dtype, one.device) for one in self.tensors}) == 1

    def _parts(self) -> list[Tensor]:
        return self.tensors if self._are_plain else [_here(one) for one in self.tensors]

    def lengths(self) -> Tensor:
        """The L2 norm of each, which overflows on large finite values."""
        parts = self._parts()
        kinds = {_sum_dtype(one) for one in parts}
        if len(kinds) == 1:
            return self._row(torch._foreach_norm(parts, 2, dtype=kinds.pop()))
        return self._row([torch.linalg.vector_norm(one, dtype=_sum_dtype(one)) for one in parts])

    def largest(self) -> Tensor:
        """The largest absolute value of each; not finite if and only if one of its values is not."""
        parts = self._parts()
        if any(one.device.type != "cpu" for one in parts):
            return self._row(torch._foreach_norm(parts, float("inf")))
        ends = [torch.aminmax(one) for one in parts]
        return torch.maximum(self._row([high for _, high in ends]), -self._row([low for low, _ in ends]))

    def sums(self) -> Tensor:
        return self._row([one.sum(dtype=_sum_dtype(one)) for one in self._parts()])

    def depths(self) -> Tensor:
        """How far each goes below zero, as a positive number, because the largest value over all ranks is kept."""
        return -self._row([one.amin() for one in self._parts()])

    def _row(self, scalars: Sequence[Tensor]) -> Tensor:
        if not scalars:
            return torch.zeros(0, device=self.device)
        if not self._is_uniform and len({(one.dtype, one.device) for one in scalars}) > 1:  # else one transfer for all
            scalars = [one.to(self.device, torch.float32, non_blocking=True) for one in scalars]
        return torch.stack(tuple(scalars)).to(self.device, torch.float32, non_blocking=True)


def _sum_dtype(tensor: Tensor) -> torch.dtype | None:
    return torch.float32 if tensor.dtype in _COARSE else None


class State(NamedTuple):
    plain: Gauge
    squares: Gauge
    found: list[Any]  # everything in the optimizers' states, to notice when it is replaced


class Layout:
    """The weights, buffers and parameter groups of a run, in an order that is the same on every rank."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.model, self.optimizers = model, list(optimizers)
        self.skipped: list[str] = []  # not measured: sparse, or of a type without norms
        groups = self.groups()
        self.kinds = [kind_of(optimizer) for optimizer in optimizers for _ in optimizer.param_groups]
        self._size = [len(group["params"]) for group in groups]
        owner = {weight: number for number, group in enumerate(groups) for weight in group["params"]}
        self.names: dict[Tensor, str] = {weight: _plain(name) for name, weight in model.named_parameters()}
        for number, group in enumerate(groups):  # weights that the model does not have
            for place, weight in enumerate(group["params"]):
                self.names.setdefault(weight, f"weight {place} of parameter group {number}")
        named = [(name, weight) for weight, name in self.names.items() if self._is_measured(name, weight)]
        self._state: State | None = None
        self.device = named[0][1].device if named else torch.device("cpu")
        weights = []
        for name, one in named:
            count = max(1, largest_share(one) * (2 if one.is_complex() else 1))
            weights.append((Weight(name, owner.get(one), sqrt(count), one.dtype in _COARSE), one))
        self.weights = Gauge(weights, self.device)
        self.is_whole = not any(is_sharded(weight) for _, weight in named)
        self.shares = 1 if self.is_whole else torch.distributed.get_world_size()

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, as they are now: loading a state replaces them."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def fits(self) -> bool:
        return [len(group["params"]) for group in self.groups()] == self._size

    def buffers(self) -> Gauge:
        """The buffers, looked up again, since a forward may replace them."""
        return self._gauge((f"buffer {_plain(name)}", one) for name, one in self.model.named_buffers())

    def kept(self, states: Mapping[str, Tree]) -> Gauge:
        return self._gauge((path.removeprefix("/"), one) for path, one in sorted_leaves(states))

    def _gauge(self, named: Iterable[tuple[str, Any]]) -> Gauge:
        tensors = [(name, one) for name, one in named if isinstance(one, Tensor) and self._is_measured(name, one)]
        return Gauge(tensors, self.device)

    def moments(self) -> State:
        """The state of the optimizers, looked up again, since a rewind may replace its tensors."""
        states = [one for optimizer in self.optimizers for one in list(optimizer.state.values())]
        found = [value for one in states if isinstance(one, dict) for value in one.values()]
        was = self._state.found if self._state is not None else []
        if self._state is None or len(found) != len(was) or not all(map(is_, found, was)):
            self._state = self._sorted(found)
        return self._state

    def _sorted(self, found: list[Any]) -> State:
        plain: list[tuple[Moment, Tensor]] = []
        squares: list[tuple[Moment, Tensor]] = []
        places = [(optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups]
        for number, (optimizer, group) in enumerate(places):
            kind, state = kind_of(optimizer), optimizer.state
            for weight in group["params"]:  # unless it was added later
                for key, value in state[weight].items() if weight in state and weight in self.names else ():
                    name = f"{key} of {self.names[weight]}"
                    if not isinstance(value, Tensor) or not self._is_measured(name, value):
                        continue
                    moment = Moment(name, number, key, bool(kind), value.dtype in _COARSE)
                    (squares if moment.is_square else plain).append((moment, value))
        return State(Gauge(plain, self.device), Gauge(squares, self.device), found)

    def _is_measured(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor is dense data of a type that has norms. Other numbers are noted as skipped."""
        is_dense = not (is_lazy(tensor) or tensor.is_meta) and tensor.layout == torch.strided
        if is_dense and tensor.dtype in _MEASURED:
            return True
        if (tensor.is_floating_point() or tensor.is_complex()) and name not in self.skipped:
            self.skipped.append(name)
        return False


def kind_of(optimizer: Optimizer) -> str:
    """The name of one of torch's own optimizers; empty for any other, also for a subclass of one of those."""
    own = type(optimizer)
    return own.__name__ if own.__module__.startswith("torch.optim.") else ""


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def digest(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return one 64-bit integer on `device`, which differs if a bit of the tensors does.

    Sums of integers neither round nor depend on an order, and each place has an odd factor of its own: no single change
    is lost, and two are only if they cancel in the same one of many columns.
    """
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        real = _here(tensor.detach())
        whole = _WHOLE[real.element_size()]
        bits = real.view(whole).flatten()  # a copy only if it is not contiguous
        rows = len(bits) // _DIGEST_COLUMNS
        parts = [bits]
        if rows >= _DIGEST_ROWS:
            inside = rows * _DIGEST_COLUMNS
            parts = [bits[:inside].view(rows, _DIGEST_COLUMNS).sum(0, dtype=whole), bits[inside:]]
        by_type.setdefault(whole, []).extend(part.to(device, non_blocking=True) for part in parts)
    if not by_type:
        return torch.zeros((), dtype=torch.int64, device=device)
    row = torch.cat([torch.cat(some).long() for some in by_type.values()])
    factors = torch.arange(1, 2 * len(row), 2, device=device).mul_(_DIGEST_FACTOR)  # odd times odd
    return (row * factors).sum()


def nonfinite(norms: Mapping[str, float]) -> Facts:
    """Say which weights, in order, have gradients that are not finite. Backward meets layers in reverse: if all up
    to one are affected, it began there.
    """
    names = [name for name, norm in norms.items() if not isfinite(norm)]
    if not names:
        return ()
    if 1 < len(names) == len(norms):
        return fact("no_gradient_finite")
    is_up_to_one = len(names) > 1 and names == [*norms][: len(names)]
    began = (names[-1].rpartition(".")[0] or names[-1]) if is_up_to_one else ""
    return fact("gradients_not_finite", names=names, bad=len(names), count=len(norms), began=began)


def largest_share(tensor: torch.Tensor) -> int:
    """The most elements of a tensor that any rank holds: the same number on all ranks."""
    if not is_sharded(tensor):
        return tensor.numel()
    sharding = sharding_of(tensor)
    sizes = list(sharding.shape)
    for ranks, placement in zip(sharding.mesh.shape, sharding.placements, strict=True):
        if placement.is_shard():
            sizes[placement.dim] = -(-sizes[placement.dim] // ranks)
    return math.prod(sizes)
