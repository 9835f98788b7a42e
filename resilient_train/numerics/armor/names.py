"""What torch's functions are called, and what may be done with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch.nn import functional

P = ParamSpec("P")
T = TypeVar("T")


def constant(function: Callable[P, T]) -> Callable[P, T]:
    """Let a compiler take the answer and not look inside.

    That is what `torch.compiler.assume_constant_result` says, but saying it there imports the whole compiler, which
    takes seconds, whether anybody compiles or not.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def about_names(function: Callable[P, T]) -> Callable[P, T]:
    """The same, and compute each answer once. Not for what is asked about the user's objects: it would keep them."""
    known = cache(function)

    def answer(*args: P.args, **kwargs: P.kwargs) -> T:
        return known(*args, **kwargs)  # type: ignore[arg-type]

    return constant(answer)


# What is called differently on its way through torch. The name of the first one stands for all.
_FAMILIES = [
    ("div", "divide", "true_divide", "truediv", "rdiv", "rtruediv", "reciprocal"),
    ("mul", "multiply", "rmul"),
    ("add", "radd"),
    ("sub", "subtract", "rsub"),
    ("pow", "rpow"),
    ("matmul", "rmatmul", "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm"),
    ("norm", "vector_norm"),
    ("acos", "arccos"),
    ("asin", "arcsin"),
    ("atanh", "arctanh"),
    ("atan2", "arctan2"),
    ("acosh", "arccosh"),
    ("std", "std_mean"),
    ("var", "var_mean"),
    ("inverse", "inv"),
    ("to", "to_copy", "half", "float", "double", "bfloat16", "type", "type_as"),
]
_HEAD = {name: family[0] for family in _FAMILIES for name in family}

_MODULES = ("linalg_", "special_", "fft_")  # `torch.linalg.inv` calls itself linalg_inv

# Those of the nn.functional functions that may write into what they are given. None of them is ever singular.
_MAY_WRITE = {
    name
    for name, function in vars(functional).items()
    if inspect.isfunction(function) and "inplace" in function.__code__.co_varnames
}
_ABOUT_NUMBERS = ("torch.distributions.", "torch.nn.functional", "torch.functional")
_HOMES = {"torch", "torch.functional", "torch.nn.functional", "_operator"}


def family(name: str) -> str:
    """Return the name that stands for all of an operation's: `div_`, `__rtruediv__` and `true_divide` are `div`."""
    bare = name.strip("_")
    for module in _MODULES:
        bare = bare.removeprefix(module)
    return _HEAD.get(bare, bare)


@about_names
def overloads(name: str) -> tuple[Any, ...]:
    """Return all forms of the operation of that name below torch's functions and methods, without those with `out=`."""
    of_modules = [getattr(torch.ops.aten, module + family(name), None) for module in ("", *_MODULES)]
    packet = next((packet for packet in of_modules if packet is not None), None)
    forms = [getattr(packet, form) for form in packet.overloads()] if packet is not None else []
    return tuple(form for form in forms if not any(argument.is_out for argument in form._schema.arguments))


@about_names
def is_pointwise(name: str) -> bool:
    """Say whether every element of the result depends on one element of each input alone."""
    forms = [form for form in overloads(name) if any("Tensor" in str(kind.type) for kind in form._schema.returns)]
    return bool(forms) and all(torch.Tag.pointwise in form.tags for form in forms)


@about_names
def rounds_exactly(name: str) -> bool:
    """Say whether every element of the result is the one number nearest to the true one, wherever it is computed."""
    return family(name) in ("add", "sub", "mul", "div")


@about_names
def is_logarithm(name: str) -> bool:
    return family(name) in ("log", "log2", "log10", "log1p")


@about_names
def computes(name: str) -> bool:
    """Say whether an operation makes new numbers: no view of its input, nothing for Python, nothing written into it."""
    if (name.endswith("_") and not name.startswith("__")) or name in _MAY_WRITE:
        return False
    if family(name) == "to":
        return True  # a copy if it changes the type, which is what can break
    returned = [kind for form in overloads(name) for kind in form._schema.returns]
    makes_tensors = any("Tensor" in str(kind.type) for kind in returned)
    return not overloads(name) or (makes_tensors and not any(kind.alias_info for kind in returned))


@constant
def is_torchs_own(kind: type) -> bool:
    """Say whether a class is torch's."""
    return kind.__module__.startswith("torch.")


@constant
def is_torchs_code(called: Any) -> bool:
    """Say whether it is a method of an object of torch's, or a function of its, written in Python and about numbers."""
    function = inspect.unwrap(getattr(called, "__func__", called))
    home = getattr(function, "__module__", None) or ""
    return inspect.isfunction(function) and home.startswith(_ABOUT_NUMBERS)


@constant
def torchs_name(called: Any) -> str:
    """Return the name of a function of torch that makes new numbers, and nothing for all else that can be called."""
    home = getattr(called, "__module__", None) or ""
    name = getattr(called, "__name__", None) or ""
    is_function = (home in _HOMES and not isinstance(called, type)) or home.startswith("torch._C") or called is pow
    return name if is_function and name and computes(name) else ""


@constant
def name_in_mode(called: Any) -> str:
    """Return the same for what a mode is handed: methods and operators as well."""
    name = getattr(called, "__name__", "")
    if torchs_name(called):
        return str(name)
    return str(name) if overloads(name) and computes(name) else ""


@about_names
def fits(called: Callable[..., Any], positional: int, keywords: tuple[str, ...]) -> bool:
    """Say whether a function takes so many arguments, and others by these names."""
    try:
        inspect.signature(called).bind(*range(positional), **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True
