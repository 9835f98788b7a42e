"""Safe operations along dimensions, and safe losses on probabilities.

What elementwise.py says of an element applies here to a slice. Where there are logits, torch's losses on logits are
better than any loss on probabilities.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from resilient_train.numerics import elementwise
from resilient_train.numerics.elementwise import finite, instead_of, is_lost, log, overflows, reach

Dim = int | list[int] | tuple[int, ...] | None


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
    return torch.where(masked, math.log(elementwise.eps(result.dtype)), result.clamp(min=torch.finfo(result.dtype).min))


@instead_of(torch.norm)
def norm(
    input: Tensor, p: float | str | None = 2.0, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """One that overflows is the largest number. Nuclear norms and norms of a negative finite p are torch's own."""
    if p == "nuc" or (isinstance(p, float | int) and -math.inf < p < 0):
        own: Tensor = torch.norm(input, p, dim, keepdim, dtype=dtype)
        return own
    power = float(p) if isinstance(p, float | int) else 2.0
    x, dims = input if dtype is None else input.to(dtype), _dims(input, dim)
    value = torch.linalg.vector_norm(x.detach(), power, dims, True)
    bad = overflows(value) | _is_steep(x.detach(), value, power, dims) | (value < reach(value.dtype))
    return _settle(bad, value, torch.linalg.vector_norm(torch.where(bad, 0.5, x), power, dims, keepdim))


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
    bad = overflows(value) | overflows(scale) | overflows(spread) | (value < reach(x.dtype))
    return _settle(bad, value, torch.std(torch.where(bad, 0.5, input), dims, correction=correction, keepdim=keepdim))


@instead_of(functional.normalize)
def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """Where `eps` is 0 in the type, as 1e-12 is in float16, the knob's eps takes its place.

    Slices are judged by gradients of up to 1 in each element: those of a tiny one in float16 (shorter than the root of
    its size times 1.5e-5) add up beyond its range, or do not, depending on the gradient.
    """
    x = input.detach()
    length = torch.linalg.vector_norm(x, p, dim, True)
    divisor = length.clamp_min(eps)
    near = divisor <= reach(length.dtype)
    pull = (x / divisor / divisor).abs().sum(dim, True).masked_fill(length < eps, 0.0)  # what reaches the norm, at most
    steep = overflows((divisor.reciprocal() + pull).to(x.dtype)) | _is_steep(x, length, p, (dim,), pull)
    bad = near | steep
    value = x / torch.where(near, elementwise.eps(length.dtype), divisor)
    return torch.where(bad, value, functional.normalize(torch.where(bad, 0.5, input), p, dim, eps))


@instead_of(torch.cosine_similarity)
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The similarity to a vector of length 0 is 0."""
    dtype = torch.promote_types(x1.dtype, x2.dtype)
    first, second = torch.broadcast_tensors(x1.to(dtype), x2.to(dtype))  # type: ignore[no-untyped-call]  # as torch does
    a, b = first.detach(), second.detach()
    length_a, length_b = (torch.linalg.vector_norm(x, 2.0, dim, True) for x in (a, b))
    of_a, of_b = length_a.clamp_min(eps), length_b.clamp_min(eps)
    unit_a, unit_b = a / of_a, b / of_b
    bad = near = (of_a <= reach(of_a.dtype)) | (of_b <= reach(of_b.dtype))
    for x, length, of_x, unit_x, unit in ((a, length_a, of_a, unit_a, unit_b), (b, length_b, of_b, unit_b, unit_a)):
        back = (unit * (unit_x / of_x)).sum(dim, True) * (x / length).masked_fill(length == 0.0, 0.0)
        bad = bad | is_lost((unit / of_x - back).abs().amax(dim, True))  # torch's slope in x
    value = torch.where(near, 0.0, (unit_a * unit_b).sum(dim, True))
    first, second = (torch.where(bad, 0.5, x) for x in (first, second))
    return _settle(bad, value, torch.cosine_similarity(first, second, dim, eps))


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
    x, near = input.detach(), reach(input.dtype)
    fine = (x >= near) & (x <= 1.0 - near)
    if x.dtype is torch.float16:  # in which the 1e-12 that bounds torch's slope is zero
        fine = fine & ((x - target) / ((1.0 - x) * x)).isfinite()
    if target.requires_grad:
        fine = fine & (x > 0.0) & (x < 1.0)
    inside = x.nan_to_num(0.5).clamp(elementwise.eps(x.dtype), 1.0 - elementwise.eps(x.dtype))
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


def _is_masked(x: Tensor, dim: int) -> Tensor:
    return (x.amax(dim, True) if x.numel() else x) == -math.inf


def _is_steep(x: Tensor, length: Tensor, p: float, dims: tuple[int, ...], grad: Tensor | float = 1.0) -> Tensor:
    """Say which slices have a norm whose slope torch cannot compute; of norms 0, 1, 2 and inf it always can."""
    if p in (0.0, 1.0, 2.0) or math.isinf(p):
        return torch.zeros_like(length, dtype=torch.bool)
    if p < 1:
        slope = x.abs().pow(p - 1).masked_fill(x == 0, 0.0) * grad * length.pow(1 - p)
    else:
        scale = (grad / length.pow(p - 1)).masked_fill(length == 0, 0.0)
        slope = (x * x.abs().pow(p - 2) if p > 2 else x.abs().pow(p - 1)) * scale
    return is_lost(slope.abs().amax(dims, True)) & ~length.isnan()


def _settle(bad: Tensor, value: Tensor, result: Tensor) -> Tensor:
    """Return `value` where it is bad; both still have the dimensions that the result may have lost."""
    return torch.where(bad.reshape(result.shape), finite(value).reshape(result.shape), result)


def _dims(input: Tensor, dim: Dim) -> tuple[int, ...]:
    if dim is None or (not isinstance(dim, int) and not dim):
        return tuple(range(input.ndim))
    return (dim,) if isinstance(dim, int) else tuple(dim)
