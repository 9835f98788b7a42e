"""Which tensors a run consists of, and what they are called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from resilient_train.state.sharded import is_sharded, largest_share
from resilient_train.watch.scans.measure import Gauge, is_coarse, is_measurable, is_number
from resilient_train.watch.scans.moments import ADAMS, Moment
from resilient_train.watch.scans.weights import Weight

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


class Buffers(NamedTuple):
    """What is measured of the buffers."""

    names: list[str]
    gauge: Gauge
    found: list[Any]  # what it was made from


class State(NamedTuple):
    """What is measured of the optimizers."""

    plain: list[Moment]
    squares: list[Moment]
    counted: list[str]  # of Adam's weights: how often each was updated
    plain_gauge: Gauge
    square_gauge: Gauge
    count_gauge: Gauge
    found: list[Any]


class Layout:
    """The weights, buffers and parameter groups of a run, in an order that is the same on every rank."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.model, self.optimizers = model, list(optimizers)
        self.skipped: list[str] = []
        groups = self.groups()
        self.kinds = [kind_of(optimizer) for optimizer in optimizers for _ in optimizer.param_groups]
        self.size = _size(groups)
        owner = {weight: number for number, group in enumerate(groups) for weight in group["params"]}
        self.names: dict[Tensor, str] = {weight: _plain(name) for name, weight in model.named_parameters()}
        named = [(self.names[weight], weight) for weight in model.parameters()]
        for number, group in enumerate(groups):
            for place, weight in enumerate(group["params"]):
                if weight not in self.names:
                    self.names[weight] = f"weight {place} of parameter group {number}"
                    named.append((self.names[weight], weight))
        named = [(name, weight) for name, weight in named if self._measured(name, weight)]
        self.weights = [
            Weight(
                name,
                owner.get(weight),
                max(1, largest_share(weight) * (2 if weight.is_complex() else 1)),
                is_coarse(weight),
            )
            for name, weight in named
        ]
        named_modules = [(_plain(name), module) for name, module in model.named_modules()]
        self._own_buffers = [(f"{name}." if name else "", module._buffers) for name, module in named_modules]
        self._buffers: Buffers | None = None
        self._state: State | None = None
        self.device = named[0][1].device if named else torch.device("cpu")
        self.gauge = Gauge([weight for _, weight in named], self.device)
        self.is_whole = not any(is_sharded(weight) for _, weight in named)
        self.shares = 1 if self.is_whole else torch.distributed.get_world_size()

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, as they are now: loading a state replaces them."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def fits(self) -> bool:
        """Whether the optimizers still have the weights they had."""
        return _size(self.groups()) == self.size

    def buffers(self) -> Buffers:
        """Those that can hold something not finite; looked up anew, since forwards may put others in their place."""
        found = [(prefix + name, one) for prefix, own in self._own_buffers if own for name, one in own.items()]
        tensors = [one for _, one in found if one is not None]
        if self._buffers is None or not _same(tensors, self._buffers.found):
            named = [(f"buffer {name}", one) for name, one in found if one is not None and is_number(one)]
            named = [(name, one) for name, one in named if self._measured(name, one)]
            gauge = Gauge([one for _, one in named], self.device)
            self._buffers = Buffers([name for name, _ in named], gauge, tensors)
        return self._buffers

    def moments(self) -> State:
        """Everything that the optimizers hold now. Its tensors are other ones after some ways of going back."""
        states = [optimizer.state for optimizer in self.optimizers]
        found = [value for state in states for held in list(state.values()) for value in _values(held)]
        if self._state is None or not _same(found, self._state.found):
            self._state = self._sorted(found)
        return self._state

    def _sorted(self, found: list[Any]) -> State:
        """Tell the tensors of the optimizers' states by what can be asked of them."""
        kept: list[tuple[Moment, Tensor]] = []
        counts: list[tuple[str, Tensor]] = []
        places = [(optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups]
        for number, (optimizer, group) in enumerate(places):
            kind, state = kind_of(optimizer), optimizer.state
            for weight in group["params"]:
                for key, value in state[weight].items() if weight in state else ():
                    name = f"{key} of {self.names[weight]}"
                    if not isinstance(value, Tensor) or not is_number(value) or not self._measured(name, value):
                        continue
                    if kind in ADAMS and key == "step":
                        counts.append((name, value))
                    else:
                        kept.append((Moment(name, number, key, bool(kind), is_coarse(value)), value))
        plain, squares = [one for one in kept if not one[0].is_square], [one for one in kept if one[0].is_square]
        return State(
            plain=[moment for moment, _ in plain],
            squares=[moment for moment, _ in squares],
            counted=[name for name, _ in counts],
            plain_gauge=Gauge([one for _, one in plain], self.device),
            square_gauge=Gauge([one for _, one in squares], self.device),
            count_gauge=Gauge([one for _, one in counts], self.device),
            found=found,
        )

    def _measured(self, name: str, tensor: Tensor) -> bool:
        if is_measurable(tensor):
            return True
        if is_number(tensor) and name not in self.skipped:
            self.skipped.append(name)
        return False


def kind_of(optimizer: Optimizer) -> str:
    """The name of one of torch's own optimizers; empty for any other, even one that is made from one of those."""
    own = type(optimizer)
    return own.__name__ if own.__module__.startswith("torch.optim.") else ""


def _size(groups: Sequence[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _values(held: Any) -> Iterable[Any]:
    return held.values() if isinstance(held, dict) else ()


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether it is the very same objects."""
    return len(some) == len(others) and all(map(is_, some, others))
