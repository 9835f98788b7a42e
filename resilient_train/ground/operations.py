"""The names of torch's operations, and what torch says of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch.nn import functional

P = ParamSpec("P")
T = TypeVar("T")

_ALIASES = {  # other names of the same operation
    **dict.fromkeys(("divide", "true_divide", "truediv", "rdiv"), "div"),
    "multiply": "mul",
    **dict.fromkeys(("subtract", "rsub"), "sub"),
    "arctan2": "atan2",
    "float_power": "pow",
}
# Families of operations that raise where a patch has a value.
HAVE_VALUES = ("cholesky", "inverse", "solve", "multinomial", "binary_cross_entropy")
# Operations that put in what they are given: a NaN in their result is one of the program's own.
GIVE = ("where", "masked_fill", "full", "full_like", "tensor")
_FAMILIES = {  # what a line may call for the same operation, for patches: the family has the name of one of them
    "reciprocal": "div",
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm"), "matmul"),
    "vector_norm": "norm",
    "std_mean": "std",
    "var_mean": "var",
    "inv": "inverse",
    **dict.fromkeys(("to_copy", "half", "float", "double", "bfloat16", "type", "type_as"), "to"),
}
_SPECIAL_METHODS = ("truediv", "floordiv", "matmul", "getitem", "add", "sub", "mul", "pow", "mod", "neg", "abs")
_MODULES = ("linalg_", "special_", "fft_")  # `torch.linalg.inv` calls itself linalg_inv

_MAY_WRITE = {  # the nn.functional functions that may write into their input. None of them is ever singular
    name
    for name, function in vars(functional).items()
    if inspect.isfunction(function) and "inplace" in function.__code__.co_varnames
}
_ABOUT_NUMBERS = ("torch.distributions.", "torch.nn.functional", "torch.functional")
_HOMES = {"torch", "torch.functional", "torch.nn.functional", "_operator"}


def op_name(name: str) -> str:
    """Return what a person calls a function of torch: `__rtruediv__` is div, `sqrt_` is sqrt."""
    bare = name.partition(".")[0].removeprefix("_foreach").strip("_") or name
    if name.startswith("__") and name.endswith("__"):
        plain = (bare.removeprefix(prefix) for prefix in ("", "r", "i"))
        bare = next((one for one in plain if one in _SPECIAL_METHODS), bare)
    return _ALIASES.get(bare, bare)


def is_in_place(name: str) -> bool:
    """Say whether a method writes into its tensor: `sqrt_`, `__itruediv__`, `__setitem__`."""
    if not name.endswith("__"):
        return name.endswith("_")
    return name == "__setitem__" or (name.startswith("__i") and name.strip("_")[1:] in _SPECIAL_METHODS)


def family(name: str) -> str:
    """Return the name that stands for all of an operation's: `div_`, `__rtruediv__` and `reciprocal` are `div`."""
    bare = op_name(name)
    for module in _MODULES:
        bare = bare.removeprefix(module)
    return _FAMILIES.get(bare, bare)


# What torch says of an operation. A compiler takes these answers as constants, and does not look inside.


def _constant(function: Callable[P, T]) -> Callable[P, T]:
    """Mark it as `torch.compiler.assume_constant_result` does, which would import the whole compiler: seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _cached(function: Callable[P, T]) -> Callable[P, T]:
    """Compute each answer once. Only for questions about names: it would keep a user's objects alive."""
    known = cache(function)

    def answer(*args: P.args, **kwargs: P.kwargs) -> T:
        return known(*args, **kwargs)  # type: ignore[arg-type]

    return _constant(answer)


@_cached
def overloads(name: str) -> tuple[Any, ...]:
    """Return all ATen forms of the operation of that name, without those with `out=`."""
    of_modules = [getattr(torch.ops.aten, module + family(name), None) for module in ("", *_MODULES)]
    packet = next((packet for packet in of_modules if packet is not None), None)
    forms = [getattr(packet, form) for form in packet.overloads()] if packet is not None else []
    return tuple(form for form in forms if not any(argument.is_out for argument in form._schema.arguments))


@_cached
def is_pointwise(name: str) -> bool:
    """Say whether every element of the result depends on one element of each input alone."""
    forms = [form for form in overloads(name) if any("Tensor" in str(kind.type) for kind in form._schema.returns)]
    return bool(forms) and all(torch.Tag.pointwise in form.tags for form in forms)


@_cached
def is_random(name: str) -> bool:
    return any(torch.Tag.nondeterministic_seeded in form.tags for form in overloads(name))


@_cached
def writes(name: str) -> bool:
    """Say whether something of that name writes into what it is given, as `append` of a list does."""
    given = [argument.alias_info for form in overloads(name) for argument in form._schema.arguments]
    return any(alias is not None and alias.is_write for alias in given)


@_cached
def computes(name: str) -> bool:
    """Say whether an operation makes new numbers: no view of its input, nothing for Python, nothing written into it."""
    if (name.endswith("_") and not name.startswith("__")) or name in _MAY_WRITE:
        return False
    if family(name) == "to":
        return True  # a copy if it changes the type, which is what can break
    returned = [kind for form in overloads(name) for kind in form._schema.returns]
    makes_tensors = any("Tensor" in str(kind.type) for kind in returned)
    return not overloads(name) or (makes_tensors and not any(kind.alias_info for kind in returned))


@_constant
def is_torchs_own(kind: type) -> bool:
    return kind.__module__.startswith("torch.")


@_constant
def is_torchs_code(called: Any) -> bool:
    """Say whether it is a function of torch's, or a method of its objects, written in Python and about numbers."""
    function = inspect.unwrap(getattr(called, "__func__", called))
    home = getattr(function, "__module__", None) or ""
    return inspect.isfunction(function) and home.startswith(_ABOUT_NUMBERS)


@_constant
def torchs_name(called: Any) -> str:
    """Return the name of a function of torch that makes new numbers, and "" for any other callable."""
    home = getattr(called, "__module__", None) or ""
    name = getattr(called, "__name__", None) or ""
    is_function = (home in _HOMES and not isinstance(called, type)) or home.startswith("torch._C") or called is pow
    return name if is_function and name and computes(name) else ""


@_constant
def name_in_mode(called: Any) -> str:
    """Return the same for what a TorchFunctionMode receives: methods and operators as well."""
    name = str(getattr(called, "__name__", ""))
    return name if torchs_name(called) or (overloads(name) and computes(name)) else ""
