"""How near to a singularity is too near, the one knob that widens it, and what is left to torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

_LARGEST = 0.1  # beyond it there would be nothing left of arccos, and `1 + eps` is no longer near 1

_factor = 1.0

P = ParamSpec("P")


def raise_eps(factor: float) -> None:
    """Let eps be `factor` times its base from now on. Not a product: `raise_eps(1)` takes any raise back.

    Compiled code takes it up too: it is compiled once for each factor that it meets, and torch has a limit for that
    (`torch._dynamo.config.recompile_limit`, 8), beyond which it runs uncompiled or, with `fullgraph`, raises.
    """
    global _factor
    if not 1.0 <= factor < math.inf:
        raise ValueError(f"eps can be raised by a factor of 1 or more, not by {factor}")
    _factor = float(factor)


def eps(dtype: torch.dtype) -> float:
    """Return the distance from a pole at which its value is taken: what 1 can be told from, times the knob's factor.

    The base is 9.8e-4 for float16, 7.8e-3 for bfloat16, 1.2e-7 for float32 and 2.2e-16 for float64.
    """
    return min(torch.finfo(dtype).eps * _factor, _LARGEST)


def reach(dtype: torch.dtype) -> float:
    """Return how near to a singularity counts as on it: nothing does but what torch cannot do, until eps is raised."""
    return eps(dtype) if _factor > 1.0 else 0.0


def edge(dtype: torch.dtype) -> float:
    """Return the largest number whose reciprocal overflows, or how far a raised eps reaches."""
    return max(torch.finfo(dtype).tiny / 4, reach(dtype))


def is_lost(x: Tensor) -> Tensor:
    """Say what is neither finite nor worth keeping. On a CPU `isfinite` takes three times as long."""
    return ~(x.abs() <= torch.finfo(x.dtype).max)


def overflows(x: Tensor) -> Tensor:
    """Say what is infinite, and leave a NaN its peace."""
    return x.abs() > torch.finfo(x.dtype).max


def finite(x: Tensor) -> Tensor:
    """Return the largest number for an infinity."""
    largest = torch.finfo(x.dtype).max
    return x.clamp(-largest, largest)


def instead_of(bare: Callable[..., Tensor]) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Leave to torch what only torch can do: complex numbers, sparse tensors, numbers of 8 bits, `out=`."""

    def decorate(safe: Callable[P, Tensor]) -> Callable[P, Tensor]:
        @wraps(safe)
        def operation(*args: P.args, **kwargs: P.kwargs) -> Tensor:
            if kwargs.get("out") is not None or any(_is_strange(value) for value in (*args, *kwargs.values())):
                return bare(*args, **kwargs)
            kwargs.pop("out", None)
            return safe(*args, **kwargs)

        return operation

    return decorate


def real(input: Tensor) -> Tensor:
    """Return whole numbers as what torch would make of them, and others as they are."""
    return input if input.is_floating_point() else input.to(torch.get_default_dtype())


def _is_strange(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return isinstance(value, complex)
    is_tiny = value.is_floating_point() and value.element_size() == 1
    return is_tiny or value.is_complex() or value.layout is not torch.strided
