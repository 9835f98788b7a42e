"""Which tensors a run consists of, and what they are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from resilient_train.watch.scans.measure import here, is_coarse, is_measurable, is_number, is_sharded
from resilient_train.watch.scans.moments import ADAMS, Moment
from resilient_train.watch.scans.weights import Weight

_WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


class Layout:
    """The weights, buffers and parameter groups of a run, in an order that is the same on every rank."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.model, self.optimizers = model, list(optimizers)
        self.skipped: list[str] = []
        groups = self.groups()
        self.kinds = [kind_of(optimizer) for optimizer in optimizers for _ in optimizer.param_groups]
        self.size = _size(groups)
        owner = {id(weight): number for number, group in enumerate(groups) for weight in group["params"]}
        self.names = {id(weight): _plain(name) for name, weight in model.named_parameters()}
        named = [(self.names[id(weight)], weight) for weight in model.parameters()]
        for number, group in enumerate(groups):
            for place, weight in enumerate(group["params"]):
                if id(weight) not in self.names:
                    self.names[id(weight)] = f"weight {place} of parameter group {number}"
                    named.append((self.names[id(weight)], weight))
        named = [(name, weight) for name, weight in named if self._measured(name, weight)]
        self.tensors = [weight for _, weight in named]
        self.weights = [
            Weight(name, owner.get(id(weight)), max(1, here(weight).numel()), is_coarse(weight))
            for name, weight in named
        ]
        self._buffers = [(_plain(f"{name}."), module._buffers) for name, module in model.named_modules()]
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self.is_whole = not any(map(is_sharded, self.tensors))

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, as they are now: loading a state replaces them."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def fits(self) -> bool:
        """Whether the optimizers still have the weights they had."""
        return _size(self.groups()) == self.size

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Those that can hold something not finite; looked up anew, since forwards may put others in their place."""
        held = [(prefix + name, one) for prefix, own in self._buffers for name, one in own.items()]
        return [
            (name.lstrip("."), one)
            for name, one in held
            if one is not None and is_number(one) and self._measured(f"buffer {name}", one)
        ]

    def moments(self) -> tuple[list[tuple[Moment, Tensor]], list[tuple[str, Tensor]]]:
        """All tensors of the optimizers' states, and of Adam's weights the count of their updates by name."""
        moments: list[tuple[Moment, Tensor]] = []
        counts: list[tuple[str, Tensor]] = []
        number = -1
        for optimizer in self.optimizers:
            kind, state = kind_of(optimizer), optimizer.state
            for group in optimizer.param_groups:
                number += 1
                for weight in group["params"]:
                    for key, value in state[weight].items() if weight in state else ():
                        if not isinstance(value, Tensor) or not is_number(value):
                            continue
                        name = f"{key} of {self.names[id(weight)]}"
                        if kind in ADAMS and key == "step":
                            counts.append((name, value))
                        elif self._measured(name, value):
                            moments.append((Moment(name, number, key, bool(kind), is_coarse(value)), value))
        return moments, counts

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
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
