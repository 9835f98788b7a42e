"""What tensors hold that is not finite, and their ranges; sparse, nested and transformed ones too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, isnan
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def floating(tree: Any) -> list[Tensor]:
    """The tensors of a tree that can hold NaN and infinity."""
    tensors = [one for one in tree_leaves(tree) if isinstance(one, Tensor)]
    return [one for one in tensors if one.is_floating_point() or one.is_complex()]


def kinds_of(tensor: Tensor) -> set[str]:
    """What a tensor holds that is not finite: nan, inf."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), _outside_of_transforms():
        values = _values(tensor)
        if values.is_meta or bool(values.isfinite().all()):
            return set()
        kinds = {"nan": values.isnan(), "inf": values.isinf()}
        return {kind for kind, mask in kinds.items() if bool(mask.any())}


def kinds_of_numbers(tree: Any) -> set[str]:
    """The same of the plain numbers of a tree, such as the value of `masked_fill`."""
    numbers = [one for one in tree_leaves(tree) if isinstance(one, float) and not isfinite(one)]
    return {"nan" if isnan(one) else "inf" for one in numbers}


def memory_of(tensor: Tensor) -> int | None:
    """Identify the memory that a tensor shares with its views."""
    with torch._C.DisableTorchFunction(), _outside_of_transforms():
        try:
            return _values(tensor).untyped_storage().data_ptr() or None
        except (RuntimeError, NotImplementedError):  # it has none, or hides it
            return None


def statistics(tensors: Sequence[Tensor]) -> tuple[Mapping[str, Any], ...]:
    """Shape, type and range of the first inputs of an operation."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), _outside_of_transforms():
        return tuple(range_of(one) for one in tensors[:4])


def numbers_of(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The plain numbers that decide what a power is: its exponent, or its base."""
    numbers = [one for one in (*args, *kwargs.values()) if op == "pow" and type(one) in (int, float)]
    return [{"shape": [], "dtype": "number", "value": float(one)} for one in numbers]


def range_of(tensor: Tensor) -> dict[str, Any]:
    """Shape and type of a tensor, and what its finite elements range over. Waits for the device."""
    values = _values(tensor).detach()
    if values.is_complex():
        values = values.abs()
    finite = values[values.isfinite()].double()
    one: dict[str, Any] = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "nonfinite": values.numel() - finite.numel(),
    }
    if finite.numel():
        sizes = finite.abs()
        nonzero = sizes[sizes > 0]
        one |= {
            "min": finite.min().item(),
            "max": finite.max().item(),
            "zeros": finite.numel() - nonzero.numel(),
            "smallest": nonzero.min().item() if nonzero.numel() else 0.0,
        }
    return one


def _values(tensor: Tensor) -> Tensor:
    """The dense numbers behind a tensor, in a type that torch can compare."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if tensor.is_nested or tensor.layout is not torch.strided:
        values = tensor._values  # a method, but of a jagged tensor the values: its method does not work inside of torch
        tensor = values if isinstance(values, Tensor) else values() if tensor.is_sparse else tensor.values()
    return tensor.float() if tensor.element_size() == 1 else tensor


class _outside_of_transforms:
    """Leaves vmap, grad and jvp for a moment: in there no value may be looked at."""

    def __enter__(self) -> None:
        self._cleared: Any = None
        if torch._C._functorch.peek_interpreter_stack() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            self._cleared = temporarily_clear_interpreter_stack()
            self._cleared.__enter__()

    def __exit__(self, *exc: Any) -> None:
        if self._cleared is not None:
            self._cleared.__exit__(*exc)
