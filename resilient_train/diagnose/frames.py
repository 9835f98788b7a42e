"""Whose line it is: the innermost frame of a user's own code, and the module it stands in."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from math import isfinite, isnan
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def floating(tree: Any) -> list[Tensor]:
    """The tensors of a tree that can hold NaN and infinity."""
    tensors = [one for one in tree_leaves(tree) if isinstance(one, Tensor)]
    return [one for one in tensors if one.is_floating_point() or one.is_complex()]


def kinds_of(tensor: Tensor) -> set[str]:
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
    with torch._C.DisableTorchFunction(), _outside_of_transforms():
        try:
            return _values(tensor).untyped_storage().data_ptr() or None
        except (RuntimeError, NotImplementedError):  # it has none, or hides it
            return None


def statistics(tensors: Sequence[Tensor]) -> tuple[Mapping[str, Any], ...]:
    """Shape, type and range of the finite elements of the first inputs of an operation. Waits for the device."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), _outside_of_transforms():
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


def _outside_of_transforms() -> AbstractContextManager[Any]:
    """Leave vmap, grad and jvp for a moment: in there no value may be looked at."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


_STANDARD = sysconfig.get_path("stdlib") + os.sep
_SITE = (sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
REPLAY = os.path.join(_OURS, "diagnose", "replay.py")  # what has called this is not the model's, but the loop's
_ZOO = os.path.join(_OURS, "zoo") + os.sep  # models to start from: as good as a user's own
_USERS, _MODELS, _OTHERS = range(3)  # whose a file is: a user's own, a library's of models, any other library's


class Line(NamedTuple):
    file: str
    line: int
    module: str = ""  # its path in the model, empty outside of it


def user_line(names: dict[int, str]) -> Line | None:
    """The innermost line on the stack of a user's own, else of transformers; `names` of modules by id."""
    second: Line | None = None
    module: str | None = None
    for frame in _outward(sys._getframe(1)):
        if frame.f_code.co_filename == REPLAY:
            break
        if module is None and isinstance(owner := frame.f_locals.get("self"), nn.Module):
            module = names.get(id(owner))
        whose = _whose(frame.f_code.co_filename)
        if whose == _USERS and module is None:  # of a function that was called in a forward
            owners = (outer.f_locals.get("self") for outer in _outward(frame))
            module = next((names[id(one)] for one in owners if isinstance(one, nn.Module) and id(one) in names), "")
        line = Line(frame.f_code.co_filename, frame.f_lineno, module or "")
        if whose == _USERS:
            return line
        if whose == _MODELS and second is None:
            second = line
    return second


class Raised(NamedTuple):
    """Where an exception came from."""

    line: Line | None  # the innermost one of a user's own that it passed, rather than of an installed package
    of_distribution: str  # what of torch.distributions that called
    called: str  # what it called at all: a module by its class, anything else by its name
    refused: Tensor | None  # by a distribution


def line_of(error: BaseException, names: dict[int, str]) -> Raised:
    line, of_distribution, called, module, refused = None, "", "", "", None
    for frame, number in walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        module = names.get(id(owner), module) if isinstance(owner, nn.Module) else module
        file = frame.f_code.co_filename
        if is_users(file) and (line is None or not file.startswith(_SITE)):
            line, of_distribution, called, refused = Line(file, number, module), "", "", None
            continue
        name = frame.f_code.co_name
        if not called:
            called = type(owner).__name__ if isinstance(owner, nn.Module) or name == "__init__" else name
        if not frame.f_globals.get("__name__", "").startswith("torch.distributions."):
            continue
        value = frame.f_locals.get("value")
        refused = value if isinstance(value, Tensor) else refused
        if not of_distribution:
            if name == "__init__":
                of_distribution = type(owner).__name__
            # What a density is asked about, if no weight had a part in it, came with the data: the rows are the cause,
            # and not the line that asks.
            elif not isinstance(value, Tensor) or value.requires_grad:
                of_distribution = name
    return Raised(line, of_distribution, called or "statement", refused)


def is_users(file: str) -> bool:
    return _whose(file) == _USERS


def called_by_us(frames: Sequence[FrameType]) -> Sequence[FrameType]:
    """The frames of a stack, innermost last, from the first of ours on: not the script that has called us."""
    files = [frame.f_code.co_filename for frame in frames]
    ours = (n for n, file in enumerate(files) if file.startswith(_OURS) and not file.startswith(_ZOO))
    return frames[next(ours, 0) :]


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@cache
def _whose(file: str) -> int:
    if file.startswith(_ZOO):
        return _USERS
    if file.startswith(("<frozen", _OURS, *_homes("torch", "accelerate", "hydra", "omegaconf"))):
        return _OTHERS
    if file.startswith(_homes("transformers")):
        return _MODELS
    return _OTHERS if file.startswith(_STANDARD) and not file.startswith(_SITE) else _USERS


@cache
def _homes(*packages: str) -> tuple[str, ...]:
    found = [importlib.util.find_spec(package) for package in packages]
    places = [place for spec in found if spec for place in spec.submodule_search_locations or ()]
    return tuple(os.path.abspath(place) + os.sep for place in places)


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

        with torch._C.DisableTorchFunction():
            for one in floating(result):
                note(self.outputs, one)
                if one.requires_grad:
                    self._hooks.append(one.register_hook(partial(note, self.gradients)))  # type: ignore[no-untyped-call]
