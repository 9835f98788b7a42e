"""Whose line it is: the innermost frame of a user's own code, and the module it stands in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_leaves


@contextmanager
def _unwatched() -> Iterator[None]:
    """Leave modes, gradients, and vmap, grad and jvp for a moment: within these no value may be looked at."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), temporarily_clear_interpreter_stack():
        yield


def floating(tree: Any) -> list[Tensor]:
    tensors = (one for one in tree_leaves(tree) if isinstance(one, Tensor))
    return [one for one in tensors if one.is_floating_point() or one.is_complex()]


@_unwatched()
def kinds_of(tensor: Tensor) -> set[str]:
    values = _values(tensor)
    if values.is_meta or bool(values.isfinite().all()):
        return set()
    kinds = {"nan": values.isnan(), "inf": values.isinf()}
    return {kind for kind, mask in kinds.items() if bool(mask.any())}


def broken(tree: Any) -> list[Tensor]:
    return [one for one in floating(tree) if kinds_of(one)]


def kinds_of_numbers(tree: Any) -> set[str]:
    """What the plain numbers of a tree are, such as the value of `masked_fill`."""
    numbers = [one for one in tree_leaves(tree) if isinstance(one, float)]
    return kinds_of(torch.tensor(numbers, dtype=torch.float64, device="cpu"))


@_unwatched()
def memory_of(tensor: Tensor) -> int | None:
    try:
        return _values(tensor).untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # it has none, or hides it
        return None


@_unwatched()
def statistics(tensors: Sequence[Tensor]) -> tuple[Mapping[str, Any], ...]:
    """Shape, type and range of the finite elements of the first inputs of an operation. Waits for the device."""
    return tuple(map(_range_of, tensors[:4]))


def _range_of(tensor: Tensor) -> dict[str, Any]:
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


@dataclass(frozen=True, slots=True)
class Output:
    """One output of one layer, or the gradient that arrived there."""

    layer: str  # its path in the model
    kind: str  # its class
    range: Mapping[str, Any]  # as of the inputs of an operation


class Layers:
    """Enter it around forward and backward: it listens to every layer of the model."""

    def __init__(self, model: nn.Module) -> None:
        self.outputs: list[Output] = []  # in the order in which they were computed
        self.gradients: list[Output] = []
        self._model, self._hooks = model, list[Any]()

    def __enter__(self) -> Layers:
        for name, module in self._model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._hooks.append(module.register_forward_hook(partial(self._saw, name)))
        return self

    def __exit__(self, *exc: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _saw(self, name: str, module: nn.Module, inputs: Any, result: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # a checkpoint computes it again, in backward
            return

        def note(where: list[Output], tensor: Tensor) -> None:
            where.append(Output(name, type(module).__name__, statistics([tensor])[0]))

        for one in floating(result):
            note(self.outputs, one)
            if one.requires_grad:
                self._hooks.append(one.register_hook(partial(note, self.gradients)))  # type: ignore[no-untyped-call]
