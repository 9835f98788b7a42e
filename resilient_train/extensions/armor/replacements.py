"""What patched code calls instead of its operations.

Only at run time it is known whether `x.norm(...)` is one, or a user's module's. What is not torch's is called as is.
"""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from resilient_train.extensions.armor import repair
from resilient_train.extensions.armor.repair import Operation, call_and_repair
from resilient_train.ground.operations import computes, is_torchs_code, is_torchs_own, name_in_mode, torchs_name

PREFIX = "__armor_"
_MOST_TO_WIDEN = 2**20  # elements of a tensor: on most GPUs doubles take long


def method(name: str, owner: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What is called instead of `owner.name(...)`: a tensor's method, or whatever else the owner has of that name."""
    if not isinstance(owner, Tensor):
        return call(getattr(owner, name), *args, **kwargs)

    bare = getattr(type(owner), name)
    return call_and_repair(bare, name, (owner, *args), kwargs) if computes(name) else bare(owner, *args, **kwargs)


def operate(name: str, left: Any, right: Any, /) -> Any:
    """What is called instead of `left / right`, whose name is `truediv`."""
    bare = getattr(operator, name)
    is_of_tensors = isinstance(left, Tensor) or isinstance(right, Tensor)  # two lists of tensors are joined
    return call_and_repair(bare, name, (left, right), {}) if is_of_tensors else bare(left, right)


def wide(value: Any) -> Any:
    """What a wider form of an expression takes in the place of a tensor. A large one stays: it would cost too much."""
    is_any = repair.is_repairable(value) and value.device.type != "mps"
    return repair.guarded(value).double() if is_any and value.numel() <= _MOST_TO_WIDEN else value


def widened(value: Any, wider: Any, bare: Any) -> Any:
    """What is called instead of `torch.log(torch.exp(x).sum())`: what armor has changed is taken from the wider one."""
    if not all(isinstance(one, Tensor) and one.is_floating_point() for one in (value, wider, bare)):
        return value
    narrow = wider.to(value.dtype)
    takes = (value.detach() != bare.detach()) & ~repair.is_lost(narrow.detach())
    return torch.where(takes, narrow, value)


def call(called: Operation, /, *args: Any, **kwargs: Any) -> Any:
    """What is called instead of `called(...)`. In code of torch's every operation is armored: no line says which."""
    if isinstance(called, nn.Module):
        is_torchs = all(is_torchs_own(type(part)) for part in called.modules())
    elif name := torchs_name(called):
        return call_and_repair(called, name, args, kwargs)
    elif repair.is_distribution(called):
        with _EveryOperation():
            return repair.call_distribution(called, args, kwargs)
    else:
        is_torchs = is_torchs_code(called)
    with _EveryOperation() if is_torchs else nullcontext():
        return called(*args, **kwargs)


class _EveryOperation(TorchFunctionMode):
    """Armors all that torch computes while it is active. It looks at no frames."""

    def __torch_function__(
        self, func: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = name_in_mode(func), kwargs or {}
        return call_and_repair(func, name, args, kwargs) if name else func(*args, **kwargs)


# By the names that patched code calls them; with underscores at the end, or a class would make them private ones.
BY_NAME = {f"{PREFIX}{one.__name__}__": one for one in (method, operate, call, wide, widened)}
