"""Safe operations. Each computes torch's own where that has a finite value and a finite slope, bit for bit.

(Except for the sign of a slope of zero in `exp` and `atan2`.) Elsewhere, element by element, or slice by slice along
a dimension:

- The value is torch's where that is finite. Outside of the domain it is that of the border: `sqrt(-1)` is `sqrt(0)`. At
  a pole it is that at `eps` from it: `log(0)` is `log(eps)`, `a / -0.0` is `-a / eps`. (A logarithm is at its pole as
  soon as its slope overflows.) What overflows is the largest number.
- The slope is zero: what torch cannot do says nothing about its inputs. One of 1/eps would be a guess, and a clip or
  Adam's memory would let all other elements pay for it. Only `exp` keeps one, for a reason of its own.

Where what comes in is finite, so is all on the way back: neither anomaly mode nor a microscope trips over it. On the
way to what is bad, where no slope flows, an infinity may occur.
A NaN stays a NaN: it was made elsewhere, and hiding it lets a run train on with dead weights and a healthy loss.
An infinity counts as a very large number, and may stay one where torch keeps it.
Where there are logits, torch's losses on logits are better than any loss on probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.nn import functional

Number = float | int
Dim = int | list[int] | tuple[int, ...] | None
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


def _reach(dtype: torch.dtype) -> float:
    """Return how near to a singularity counts as on it: 0, so only what torch cannot compute, until eps is raised."""
    return eps(dtype) if _factor > 1.0 else 0.0


def _edge(dtype: torch.dtype) -> float:
    """Return the largest number whose reciprocal overflows, or how far a raised eps reaches."""
    return max(torch.finfo(dtype).tiny / 4, _reach(dtype))


def is_lost(x: Tensor) -> Tensor:
    """Say what is not finite. On a CPU `isfinite` takes three times as long."""
    return ~(x.abs() <= torch.finfo(x.dtype).max)


def _overflows(x: Tensor) -> Tensor:
    """Say what is infinite; a NaN is not."""
    return x.abs() > torch.finfo(x.dtype).max


def _finite(x: Tensor) -> Tensor:
    """Replace infinities by the largest number."""
    largest = torch.finfo(x.dtype).max
    return x.clamp(-largest, largest)


def instead_of(bare: Callable[..., Tensor]) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Call torch's own function for what only torch supports: complex, sparse and 8-bit tensors, `out=`."""

    def is_torchs(value: Any) -> bool:
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_complex():
            return isinstance(value, complex | Tensor)
        return value.is_floating_point() and value.element_size() == 1

    def decorate(safe: Callable[P, Tensor]) -> Callable[P, Tensor]:
        @wraps(safe)
        def operation(*args: P.args, **kwargs: P.kwargs) -> Tensor:
            if kwargs.get("out") is not None or any(map(is_torchs, (*args, *kwargs.values()))):
                return bare(*args, **kwargs)
            kwargs.pop("out", None)
            return safe(*args, **kwargs)

        return operation

    return decorate


def _on_one(
    bare: Callable[[Tensor], Tensor], is_bad: Callable[[Tensor], Tensor], nearest: Callable[[Tensor], Tensor | float]
) -> Callable[[Tensor], Tensor]:
    """An operation on one number that has its value at `nearest`, and no slope, where its input `is_bad`."""

    @instead_of(bare)
    def operation(input: Tensor) -> Tensor:
        x = input if input.is_floating_point() else input.to(torch.get_default_dtype())
        still = x.detach()
        bad = is_bad(still)
        return _settle(bad, bare(torch.where(bad, nearest(still), still)), bare, x)

    return operation


log = _on_one(torch.log, lambda x: x <= _edge(x.dtype), lambda x: eps(x.dtype))
log2 = _on_one(torch.log2, lambda x: x * math.log(2) <= _edge(x.dtype), lambda x: eps(x.dtype))
log10 = _on_one(torch.log10, lambda x: x * math.log(10) <= _edge(x.dtype), lambda x: eps(x.dtype))
log1p = _on_one(torch.log1p, lambda x: x <= _reach(x.dtype) - 1.0, lambda x: eps(x.dtype) - 1.0)
sqrt = _on_one(torch.sqrt, lambda x: x <= _reach(x.dtype), lambda x: x.clamp(min=0.0))
rsqrt = _on_one(
    torch.rsqrt,
    lambda x: (x <= _reach(x.dtype)) | _overflows(torch.rsqrt(x).pow(3).to(x.dtype)),  # the latter is its slope
    lambda x: torch.where(x <= _reach(x.dtype), eps(x.dtype), x),
)
reciprocal = _on_one(
    torch.reciprocal,
    lambda x: (x.abs() <= _edge(x.dtype)) | _overflows(torch.reciprocal(x).square().to(x.dtype)),
    lambda x: torch.where(x.abs() <= _edge(x.dtype), _away_from_zero(x), x),
)
acos = _on_one(torch.acos, lambda x: x.abs() >= 1.0 - _reach(x.dtype), lambda x: x.clamp(-1.0, 1.0))
asin = _on_one(torch.asin, lambda x: x.abs() >= 1.0 - _reach(x.dtype), lambda x: x.clamp(-1.0, 1.0))
atanh = _on_one(
    torch.atanh, lambda x: x.abs() >= 1.0 - _reach(x.dtype), lambda x: x.clamp(eps(x.dtype) - 1.0, 1.0 - eps(x.dtype))
)


_logit = _on_one(
    torch.logit,
    lambda x: (x <= _edge(x.dtype)) | (x >= 1.0 - _reach(x.dtype)),
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
    limit = -math.log(eps(x.dtype)) if _reach(x.dtype) else _EXP_LIMIT[x.dtype]
    beyond = x > limit
    pull = (_finite(x) - _finite(x).detach()) / eps(x.dtype)  # 0, with a slope
    return torch.where(beyond, pull + math.exp(limit), torch.exp(torch.where(beyond, 0.5, x)))


@instead_of(torch.atan2)
def atan2(input: Tensor, other: Tensor) -> Tensor:
    value = torch.atan2(input.detach(), other.detach())
    y, x = _still(input, value), _still(other, value)
    near = y * y + x * x <= max(torch.finfo(value.dtype).tiny / 4, _reach(value.dtype) ** 2)  # that of 1e-20 is zero
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
    if near := _reach(value.dtype):
        bad = bad | (small <= near)
    value = torch.where(bad, _finite(divide(x, _away_from_zero(divisor))), value)
    if not isinstance(other, Tensor) and abs(other) <= _edge(value.dtype):
        bad, other = torch.ones_like(bad), 1.0
    elif input.requires_grad:
        bad = bad | (small <= max(_edge(value.dtype), _edge(input.dtype)))
    if isinstance(other, Tensor) and other.requires_grad:
        bad = bad | _overflows((value / divisor).to(other.dtype))
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
        bad = bad | _overflows((p * torch.pow(x, p - 1)).to(input.dtype))
    if isinstance(exponent, Tensor) and exponent.requires_grad:
        bad = bad | (is_lost((value * x.log()).to(exponent.dtype)) & ((x != 0) | (p < 0)))
    if near := _reach(value.dtype):
        lost = lost | ((x.abs() <= near) & (p < 0))
        bad = bad | ((x.abs() <= near) & (p < 1))
    away = torch.where(value.isnan(), x, x.abs()).clamp(min=eps(value.dtype))
    nearby = _finite(torch.pow(away, p))
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


# Along dimensions.


@instead_of(torch.softmax)
def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """A slice of -inf only gives zeros, as in torch's attention."""
    x = input if dtype is None else input.to(dtype)
    masked = _is_masked(x, dim)
    return torch.where(masked, 0.0, torch.softmax(torch.where(masked, 0.0, x), dim))


@instead_of(torch.log_softmax)
def log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """A slice of -inf only gives log(eps), a single -inf the lowest finite number, so that 0 * log(0) is 0."""
    x = input if dtype is None else input.to(dtype)
    masked = _is_masked(x, dim)
    result = torch.log_softmax(torch.where(masked, 0.0, x), dim)
    return torch.where(masked, math.log(eps(result.dtype)), result.clamp(min=torch.finfo(result.dtype).min))


def _is_masked(x: Tensor, dim: int) -> Tensor:
    return (x.amax(dim, True) if x.numel() else x) == -math.inf


@instead_of(torch.norm)
def norm(
    input: Tensor, p: float | str | None = 2.0, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """One that overflows is the largest number. Norms of another p than 0, 1, 2 and inf are torch's own."""
    power = 2.0 if p in (None, "fro") else p
    if power not in (0, 1, 2, math.inf):
        own: Tensor = torch.norm(input, p, dim, keepdim, dtype=dtype)
        return own
    x, dims = input if dtype is None else input.to(dtype), _dims(input, dim)
    value = torch.linalg.vector_norm(x.detach(), power, dims, True)
    bad = _overflows(value) | (value < _reach(value.dtype))
    return _settle_slices(bad, value, torch.linalg.vector_norm(torch.where(bad, 0.5, x), power, dims, keepdim))


@instead_of(torch.std)
def std(
    input: Tensor, dim: Dim = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> Tensor:
    """A single number deviates by zero. `unbiased` is torch's older form of `correction`: alone, or after `dim`."""
    if isinstance(dim, bool):
        return std(input, None, dim, keepdim, correction=correction)
    correction = int(unbiased) if correction is None else correction
    dims = _dims(input, dim)
    count = math.prod([input.shape[d] for d in dims])
    if count <= correction:
        return (input * 0.0).sum(dims, keepdim)  # a NaN stays one
    x = input.detach()
    value = torch.std(x, dims, correction=correction, keepdim=True)
    lost = value.isnan() & ~x.amax(dims, True).isnan()  # it overflows into a NaN too
    value = value.masked_fill(lost, math.inf)
    scale = 2.0 / (count - correction) * (1.0 / (2.0 * value)).masked_fill(value == 0.0, 0.0)
    spread = (x - x.mean(dims, True)).abs().amax(dims, True)
    bad = _overflows(value) | _overflows(scale) | _overflows(spread) | (value < _reach(x.dtype))
    result = torch.std(torch.where(bad, 0.5, input), dims, correction=correction, keepdim=keepdim)
    return _settle_slices(bad, value, result)


# `eps` is the name of torch's argument.
_eps = eps


@instead_of(functional.normalize)
def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """Where `eps` is 0 in the type, as 1e-12 is in float16, the knob's eps takes its place.

    Slices are judged by gradients of up to 1 in each element: those of a tiny one in float16 (shorter than the root of
    its size times 1.5e-5) add up beyond its range, or do not, depending on the gradient.
    """
    x = input.detach()
    length = torch.linalg.vector_norm(x, p, dim, True)
    divisor = length.clamp_min(eps)
    near = divisor <= _reach(length.dtype)
    pull = (x / divisor / divisor).abs().sum(dim, True).masked_fill(length < eps, 0.0)  # what reaches the norm, at most
    bad = near | _overflows((divisor.reciprocal() + pull).to(x.dtype)) | _is_steep(x, length, p, dim, pull)
    value = x / torch.where(near, _eps(length.dtype), divisor)
    return torch.where(bad, value, functional.normalize(torch.where(bad, 0.5, input), p, dim, eps))


def _is_steep(x: Tensor, length: Tensor, p: float, dim: int, grad: Tensor) -> Tensor:
    """Say which slices have a norm whose slope torch cannot compute; of norms 0, 1, 2 and inf it always can."""
    if p in (0.0, 1.0, 2.0) or math.isinf(p):
        return torch.zeros_like(length, dtype=torch.bool)
    if p < 1:
        slope = x.abs().pow(p - 1).masked_fill(x == 0, 0.0) * grad * length.pow(1 - p)
    else:
        scale = (grad / length.pow(p - 1)).masked_fill(length == 0, 0.0)
        slope = (x * x.abs().pow(p - 2) if p > 2 else x.abs().pow(p - 1)) * scale
    return is_lost(slope.abs().amax(dim, True)) & ~length.isnan()


@instead_of(torch.cosine_similarity)
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The similarity to a vector of length 0 is 0."""
    dtype = torch.promote_types(x1.dtype, x2.dtype)
    first, second = torch.broadcast_tensors(x1.to(dtype), x2.to(dtype))  # type: ignore[no-untyped-call]  # as torch does
    a, b = first.detach(), second.detach()
    length_a, length_b = (torch.linalg.vector_norm(x, 2.0, dim, True) for x in (a, b))
    of_a, of_b = length_a.clamp_min(eps), length_b.clamp_min(eps)
    unit_a, unit_b = a / of_a, b / of_b
    bad = near = (of_a <= _reach(of_a.dtype)) | (of_b <= _reach(of_b.dtype))
    for x, length, of_x, unit_x, unit in ((a, length_a, of_a, unit_a, unit_b), (b, length_b, of_b, unit_b, unit_a)):
        back = (unit * (unit_x / of_x)).sum(dim, True) * (x / length).masked_fill(length == 0.0, 0.0)
        bad = bad | is_lost((unit / of_x - back).abs().amax(dim, True))  # torch's slope in x
    value = torch.where(near, 0.0, (unit_a * unit_b).sum(dim, True))
    first, second = (torch.where(bad, 0.5, x) for x in (first, second))
    return _settle_slices(bad, value, torch.cosine_similarity(first, second, dim, eps))


def _settle_slices(bad: Tensor, value: Tensor, result: Tensor) -> Tensor:
    """Return `value` where it is bad; both still have the dimensions that the result may have lost."""
    return torch.where(bad.reshape(result.shape), _finite(value).reshape(result.shape), result)


def _dims(input: Tensor, dim: Dim) -> tuple[int, ...]:
    if dim is None or (not isinstance(dim, int) and not dim):
        return tuple(range(input.ndim))
    return (dim,) if isinstance(dim, int) else tuple(dim)


# Losses on probabilities.


@instead_of(functional.binary_cross_entropy)
def binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """A number outside [0, 1] counts as eps from its end, and a NaN gives a NaN; torch raises for both.

    It raises where torch does for another reason: for targets outside [0, 1], and under CUDA's autocast.
    """
    if size_average is not None or reduce is not None:  # torch's deprecated arguments
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    x, near = input.detach(), _reach(input.dtype)
    fine = (x >= near) & (x <= 1.0 - near)
    if x.dtype is torch.float16:  # in which the 1e-12 that bounds torch's slope is zero
        fine = fine & ((x - target) / ((1.0 - x) * x)).isfinite()
    if target.requires_grad:
        fine = fine & (x > 0.0) & (x < 1.0)
    inside = x.nan_to_num(0.5).clamp(eps(x.dtype), 1.0 - eps(x.dtype))
    result = functional.binary_cross_entropy(torch.where(fine, input, inside), target, weight, reduction=reduction)
    lost = x.isnan() if reduction == "none" else x.isnan().any()
    return result.masked_fill(lost, math.nan)


def cross_entropy_of_probabilities(
    input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """What `F.cross_entropy` is for logits, for probabilities of the same shape: one of 0 costs -log(eps).

    Targets are classes, or as many probabilities as there are in the input.
    """
    logs = log(input)
    if not target.is_floating_point():
        return functional.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction)
    classes = 1 if input.ndim > 1 else 0
    if weight is not None:
        target = target * weight.reshape(-1, *(1,) * (input.ndim - 1 - classes))
    losses = -(target * logs).sum(classes)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / max(1, losses.numel())
