"""Whose line it is: the innermost frame of a user's own code, and the module it stands in."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple

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


_STANDARD = sysconfig.get_path("stdlib") + os.sep
_SITE = (sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep)
_OURS = str(Path(__file__).parents[2]) + os.sep
REPLAY = str(Path(__file__).with_name("replay.py"))  # what has called this is not the model's, but the loop's
_ZOO = os.path.join(_OURS, "zoo") + os.sep  # models to start from: as good as a user's own
_USERS, _MODELS, _OTHERS = range(3)  # whose a file is: a user's own, a library's of models, any other library's


class Line(NamedTuple):
    file: str
    line: int
    module: str = ""  # its path in the model, empty outside of it


def user_line(names: Mapping[int, str]) -> Line | None:
    """The innermost line on the stack of a user's own, else of transformers; `names` of modules by id."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != REPLAY:
        frames.append(frame)
        frame = frame.f_back
    for whose in (_USERS, _MODELS):
        for frame in frames:
            if _whose(frame.f_code.co_filename) == whose:
                return Line(frame.f_code.co_filename, frame.f_lineno, _module_of(frames, names))
    return None


def _module_of(frames: Iterable[FrameType], names: Mapping[int, str]) -> str:
    owners = (id(frame.f_locals.get("self")) for frame in frames)
    return next((names[owner] for owner in owners if owner in names), "")


class Raised(NamedTuple):
    line: Line | None  # the innermost one of a user's own that it passed, rather than of an installed package
    called: str  # what that called: a module by its class, anything else by its name
    of_distribution: bool = False  # that is one of torch.distributions
    refused: Tensor | None = None  # by it


def line_of(error: BaseException, names: Mapping[int, str]) -> Raised:
    passed = [*walk_tb(error.__traceback__)]
    users = [at for at, (frame, _) in enumerate(passed) if is_users(frame.f_code.co_filename)]
    own = [at for at in users if not passed[at][0].f_code.co_filename.startswith(_SITE)] or users[:1]
    line, inside = None, [frame for frame, _ in passed]  # `inside`: what that line called
    if own:
        frame, number = passed[own[-1]]
        line = Line(frame.f_code.co_filename, number, _module_of(reversed(inside[: own[-1] + 1]), names))
        inside = inside[own[-1] + 1 :]
    called, refused = "", None
    for frame in inside:
        if not frame.f_globals.get("__name__", "").startswith("torch.distributions."):
            continue
        value = frame.f_locals.get("value")
        refused = value if isinstance(value, Tensor) else refused
        # What a density is asked about, if no weight had a part in it, came with the data: the rows are the cause,
        # and not the line that asks.
        if frame.f_code.co_name == "__init__" or not isinstance(value, Tensor) or value.requires_grad:
            called = called or _called(frame)
    if called:
        return Raised(line, called, True, refused)
    return Raised(line, _called(inside[0]) if inside else "statement")


def _called(frame: FrameType) -> str:
    owner, name = frame.f_locals.get("self"), frame.f_code.co_name
    return type(owner).__name__ if isinstance(owner, nn.Module) or name == "__init__" else name


def is_users(file: str) -> bool:
    return _whose(file) == _USERS


def called_by_us(frames: Sequence[FrameType]) -> Sequence[FrameType]:
    """The frames of a stack, innermost last, from the first of ours on: not the script that has called us."""
    files = [frame.f_code.co_filename for frame in frames]
    ours = (n for n, file in enumerate(files) if file.startswith(_OURS) and not file.startswith(_ZOO))
    return frames[next(ours, 0) :]


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

        for one in floating(result):
            note(self.outputs, one)
            if one.requires_grad:
                self._hooks.append(one.register_hook(partial(note, self.gradients)))  # type: ignore[no-untyped-call]
