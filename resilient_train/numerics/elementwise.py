"""Safe operations on single numbers.

Each computes torch's own operation where that has a finite value and a finite slope, bit for bit, except
for the sign of a slope of zero in `exp` and `atan2`. Elsewhere, element by element:

- The value is torch's where that is finite. Outside of the domain it is that of the border: `sqrt(-1)` is `sqrt(0)`. At
  a pole it is that at `eps` from it: `log(0)` is `log(eps)`, `a / -0.0` is `-a / eps`. (A logarithm is at its pole as
  soon as its slope overflows.) What overflows is the largest number.
- The slope is zero: what torch cannot do says nothing about its inputs. One of 1/eps would be a guess, and a clip or
  Adam's memory would let all other elements pay for it. Only `exp` keeps one, for a reason of its own.

Where what comes in is finite, so is all on the way back: neither anomaly mode nor a microscope trips over it. On the
way to what is bad, where no slope flows, an infinity may occur.
A NaN stays a NaN: it was made elsewhere, and hiding it lets a run train on with dead weights and a healthy loss.
An infinity counts as a very large number, and may stay one where torch keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

Number = float | int
P = ParamSpec("P")

_LARGEST_EPS = 0.1  # beyond it nothing would be left of arccos, and `1 + eps` is no longer near 1
_factor = 1.0  # what eps is multiplied by

# The largest numbers whose exponential is finite.
_EXP_LIMIT = {
    torch.float16: 11.0859375,
    torch.bfloat16: 88.5,
    torch.float32: 88.72283172607422,
    torch.float64: 709.782712893384,
}


def raise_eps(factor: float) -> None:
    """Set eps to `factor` times its base. It does not accumulate: `raise_eps(1)` undoes any raise.

    Compiled code follows: it is compiled once for each factor, up to torch's limit
    (`torch._dynamo.config.recompile_limit`, 8), beyond which it runs uncompiled or, with `fullgraph`, raises.
    """
    global _factor
    if not 1.0 <= factor < math.inf:
        raise ValueError(f"eps can be raised by a factor of 1 or more, not by {factor}")
    _factor = float(factor)


def eps(dtype: torch.dtype) -> float:
    """Return the distance from a pole at which its value is taken: the dtype's machine epsilon times the knob's factor.

    It is 9.8e-4 for float16, 7.8e-3 for bfloat16, 1.2e-7 for float32 and 2.2e-16 for float64.
    """
    return min(torch.finfo(dtype).eps * _factor, _LARGEST_EPS)


def reach(dtype: torch.dtype) -> float:
    """Return how near to a singularity counts as on it: 0, so only what torch cannot compute, until eps is raised."""
    return eps(dtype) if _factor > 1.0 else 0.0


def edge(dtype: torch.dtype) -> float:
    """Return the largest number whose reciprocal overflows, or how far a raised eps reaches."""
    return max(torch.finfo(dtype).tiny / 4, reach(dtype))


def is_lost(x: Tensor) -> Tensor:
    """Say what is not finite. On a CPU `isfinite` takes three times as long."""
    return ~(x.abs() <= torch.finfo(x.dtype).max)


def overflows(x: Tensor) -> Tensor:
    """Say what is infinite; a NaN is not."""
    return x.abs() > torch.finfo(x.dtype).max


def finite(x: Tensor) -> Tensor:
    """Replace infinities by the largest number."""
    largest = torch.finfo(x.dtype).max
    return x.clamp(-largest, largest)


def instead_of(bare: Callable[..., Tensor]) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Call torch's own function for what only torch supports: complex, sparse and 8-bit tensors, `out=`."""

    def decorate(safe: Callable[P, Tensor]) -> Callable[P, Tensor]:
        @wraps(safe)
        def operation(*args: P.args, **kwargs: P.kwargs) -> Tensor:
            if kwargs.get("out") is not None or any(_is_unsupported(value) for value in (*args, *kwargs.values())):
                return bare(*args, **kwargs)
            kwargs.pop("out", None)
            return safe(*args, **kwargs)

        return operation

    return decorate


def _is_unsupported(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return isinstance(value, complex)
    is_tiny = value.is_floating_point() and value.element_size() == 1
    return is_tiny or value.is_complex() or value.layout is not torch.strided


def _on_one(
    bare: Callable[[Tensor], Tensor],
    is_bad: Callable[[Tensor], Tensor],
    nearest: Callable[[Tensor], Tensor | float],
) -> Callable[[Tensor], Tensor]:
    """An operation on one number that has its value at `nearest`, and no slope, where its input `is_bad`."""

    @instead_of(bare)
    def operation(input: Tensor) -> Tensor:
        x = input if input.is_floating_point() else input.to(torch.get_default_dtype())
        still = x.detach()
        bad = is_bad(still)
        return _settle(bad, bare(torch.where(bad, nearest(still), still)), bare, x)

    return operation


log = _on_one(torch.log, lambda x: x <= edge(x.dtype), lambda x: eps(x.dtype))
log2 = _on_one(torch.log2, lambda x: x * math.log(2) <= edge(x.dtype), lambda x: eps(x.dtype))
log10 = _on_one(torch.log10, lambda x: x * math.log(10) <= edge(x.dtype), lambda x: eps(x.dtype))
log1p = _on_one(torch.log1p, lambda x: x <= reach(x.dtype) - 1.0, lambda x: eps(x.dtype) - 1.0)
sqrt = _on_one(torch.sqrt, lambda x: x <= reach(x.dtype), lambda x: x.clamp(min=0.0))
rsqrt = _on_one(
    torch.rsqrt,
    lambda x: (x <= reach(x.dtype)) | overflows(torch.rsqrt(x).pow(3).to(x.dtype)),  # the latter is its slope
    lambda x: torch.where(x <= reach(x.dtype), eps(x.dtype), x),
)
reciprocal = _on_one(
    torch.reciprocal,
    lambda x: (x.abs() <= edge(x.dtype)) | overflows(torch.reciprocal(x).square().to(x.dtype)),
    lambda x: torch.where(x.abs() <= edge(x.dtype), _away_from_zero(x), x),
)
acos = _on_one(torch.acos, lambda x: x.abs() >= 1.0 - reach(x.dtype), lambda x: x.clamp(-1.0, 1.0))
asin = _on_one(torch.asin, lambda x: x.abs() >= 1.0 - reach(x.dtype), lambda x: x.clamp(-1.0, 1.0))
atanh = _on_one(
    torch.atanh,
    lambda x: x.abs() >= 1.0 - reach(x.dtype),
    lambda x: x.clamp(eps(x.dtype) - 1.0, 1.0 - eps(x.dtype)),
)


_logit = _on_one(
    torch.logit,
    lambda x: (x <= edge(x.dtype)) | (x >= 1.0 - reach(x.dtype)),
    lambda x: x.clamp(eps(x.dtype), 1.0 - eps(x.dtype)),
)


def logit(input: Tensor, eps: float | None = None) -> Tensor:
    """What `eps` clamps needs nothing else."""
    return torch.logit(input, eps) if eps else _logit(input)


@instead_of(torch.exp)
def exp(input: Tensor) -> Tensor:
    """The largest finite value is the limit, 1/eps where eps is raised.

    Beyond it the slope is 1/eps. Where an exponential overflows, something else in the loss mostly pulls the other way
    (`exp(x) - t * x`, `exp(v) - v`): without a slope against it x would keep growing.
    """
    x = input if input.is_floating_point() else input.to(torch.get_default_dtype())
    limit = -math.log(eps(x.dtype)) if reach(x.dtype) else _EXP_LIMIT[x.dtype]
    beyond = x > limit
    pull = (finite(x) - finite(x).detach()) / eps(x.dtype)  # 0, with a slope
    return torch.where(beyond, pull + math.exp(limit), torch.exp(torch.where(beyond, 0.5, x)))


@instead_of(torch.atan2)
def atan2(input: Tensor, other: Tensor) -> Tensor:
    value = torch.atan2(input.detach(), other.detach())
    y, x = _still(input, value), _still(other, value)
    near = y * y + x * x <= max(torch.finfo(value.dtype).tiny / 4, reach(value.dtype) ** 2)  # that of 1e-20 is zero
    return _settle(near, value, torch.atan2, input, other)


@instead_of(torch.div)
def div(input: Tensor, other: Tensor | Number, *, rounding_mode: str | None = None) -> Tensor:
    """A divisor too small to divide by counts as eps with its own sign: -1e-40 must not flip the quotient's sign."""
    divide = partial(torch.div, rounding_mode=rounding_mode)
    value = divide(input.detach(), other.detach() if isinstance(other, Tensor) else other)
    if not value.is_floating_point():
        return value
    x, divisor = _still(input, value), _still(other, value)
    small, bad = divisor.abs(), is_lost(value)
    if near := reach(value.dtype):
        bad = bad | (small <= near)
    value = torch.where(bad, finite(divide(x, _away_from_zero(divisor))), value)
    if not isinstance(other, Tensor) and abs(other) <= edge(value.dtype):
        bad, other = torch.ones_like(bad), 1.0
    elif input.requires_grad:
        bad = bad | (small <= max(edge(value.dtype), edge(input.dtype)))
    if isinstance(other, Tensor) and other.requires_grad:
        bad = bad | overflows((value / divisor).to(other.dtype))
    return _settle(bad, value, divide, input, other)


@instead_of(torch.pow)
def pow(input: Tensor | Number, exponent: Tensor | Number) -> Tensor:
    """Zero whose power is infinite counts as eps with its sign; a negative number that has no such power as eps."""
    p = exponent.detach() if isinstance(exponent, Tensor) else exponent
    value: Tensor = torch.pow(input.detach() if isinstance(input, Tensor) else input, p)  # type: ignore[arg-type]
    if not value.is_floating_point():
        return value
    x = _still(input, value)
    bad = lost = is_lost(value)
    if isinstance(input, Tensor) and input.requires_grad:
        bad = bad | overflows((p * torch.pow(x, p - 1)).to(input.dtype))
    if isinstance(exponent, Tensor) and exponent.requires_grad:
        bad = bad | (is_lost((value * x.log()).to(exponent.dtype)) & ((x != 0) | (p < 0)))
    if near := reach(value.dtype):
        lost = lost | ((x.abs() <= near) & (p < 0))
        bad = bad | ((x.abs() <= near) & (p < 1))
    away = torch.where(value.isnan(), x, x.abs()).clamp(min=eps(value.dtype))
    nearby = finite(torch.pow(away, p))
    value = torch.where(lost, torch.where(value < 0, -nearby, nearby), value)
    if isinstance(input, Tensor):  # any power of 1 is fine, and has no slope in the exponent
        return torch.where(bad, value, torch.pow(torch.where(bad, 1.0, _alike(input, value)), exponent))
    if isinstance(exponent, Tensor) and exponent.requires_grad:
        input = abs(input)  # all of a negative number's powers are bad, and its logarithm is a NaN
    return _settle(bad, value, torch.pow, input, exponent)


def _settle(bad: Tensor, value: Tensor, operation: Callable[..., Tensor], *inputs: Tensor | Number) -> Tensor:
    """Return `value` where it is bad, without a slope, and the operation elsewhere.

    Bad elements are kept out of the operation too: a NaN that is only masked at the end comes back as 0 * inf.
    """
    harmless = (torch.where(bad, 0.5, _alike(x, value)) if isinstance(x, Tensor) else x for x in inputs)
    return torch.where(bad, value, operation(*harmless))


def _still(x: Tensor | Number, value: Tensor) -> Tensor:
    """The input, detached, in the type that torch computed `value` in."""
    if isinstance(x, Tensor):
        return x.detach().to(value.dtype)
    return torch.full((), x, dtype=value.dtype, device=value.device)


def _alike(x: Tensor, value: Tensor) -> Tensor:
    """An input that can be broadcast with `value`: torch promotes scalars and integers to the other type."""
    return x if x.ndim and x.is_floating_point() else x.to(value.dtype)


def _away_from_zero(x: Tensor) -> Tensor:
    return x.abs().clamp(min=eps(x.dtype)).copysign(x)
