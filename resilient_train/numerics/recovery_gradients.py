"""Gradients that lead a broken element back to where its operation works.

An operation that breaks in every batch mostly does so because of where a learned number has moved: a power at a pole,
a variance below zero. With a gradient of zero it would stay there for the rest of the run. So an element that broke
learns as if it were at a working point nearby:

- at a pole, at a point a step away from it. The slope there is steep only because the step is small, so it counts as 1
  at most, and no other element pays for it in a clip or in Adam's moments; that of an input that was not moved counts
  as much as the steepest of the others at most;
- beyond the border of a domain the gradient is zero, as behind a `clamp`, unless no element at all worked: then
  nothing else would teach what is to be learned.

The gradient only ever leads inward: one that would take the element farther out becomes zero. All of this is computed
from values, so no table of derivatives is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_FAR = 2.0**10  # from a border: that is no overflow
_STEEPEST = 1.0
_MOST = 2**20  # elements of a result: what is computed here takes several times its memory


def led_back(
    value: Tensor, broken: Tensor, bare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Return the value of a pointwise operation with a gradient for what broke in it."""
    places = [
        place
        for place, one in enumerate(args)
        if isinstance(one, Tensor)
        and one.is_floating_point()
        and one.layout is torch.strided
        and one.element_size() > 1
    ]
    if not torch.is_grad_enabled() or not any(args[place].requires_grad for place in places):
        return value
    if any(isinstance(one, Tensor) for one in kwargs.values()) or broken.numel() > _MOST or _is_known_whole(broken):
        return value
    with torch.no_grad():
        taken = [one.detach().expand(broken.shape) if isinstance(one, Tensor) else one for one in args]

        def evaluate(values: list[Tensor]) -> Tensor:
            filled = dict(zip(places, values, strict=True))
            return bare(*(filled.get(place, one) for place, one in enumerate(taken)), **kwargs)  # type: ignore[no-any-return]

        before = [taken[place] for place in places]
        points, lost, alone = list(before), broken, broken.all()
        for place, x in enumerate(before):
            for tried, is_next_to in _candidates(x):
                may = lost & (is_next_to | (alone & (x.abs() < _FAR)))
                fine = may & _finite(evaluate([*points[:place], tried, *points[place + 1 :]]))
                points[place] = torch.where(fine, tried, points[place])
                lost = lost & ~fine
        moved = torch.stack([point != x for point, x in zip(points, before, strict=True)]).any(0)
        here, led = evaluate(points), []
        for place, (x, point) in enumerate(zip(before, points, strict=True)):
            inward = torch.sign(point - x)
            step = _nearby(x.dtype) * torch.clamp(point.abs(), min=1.0).sqrt()  # between rounding and curvature
            there = point + torch.copysign(step, torch.where(inward == 0.0, x, inward))
            rise = evaluate([*points[:place], there, *points[place + 1 :]]) - here
            slope = torch.nan_to_num(rise / (there - point), 0.0, 0.0, 0.0)
            usual = torch.where(moved | broken, 0.0, slope.abs()).amax().clamp(min=_STEEPEST)
            limit = torch.where(inward == 0.0, usual, _STEEPEST)
            led += [torch.where(moved, slope.clamp(-limit, limit), 0.0).to(value.dtype), inward.to(value.dtype)]
    inputs = [args[place].expand(value.shape) for place in places]
    return _LedBack.apply(value, *led, *inputs)  # type: ignore[no-any-return, no-untyped-call]


def _is_known_whole(broken: Tensor) -> bool:
    """Say whether nothing broke, where that takes no more than one pass: on a CPU in eager mode.

    Elsewhere it would wait for the device, and a compiler or transform cannot branch on it.
    """
    if broken.device.type != "cpu" or type(broken) is not Tensor or torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None and not bool(broken.any())


def _candidates(x: Tensor) -> list[tuple[Tensor, bool]]:
    """A step outward and inward, which are next to it, then next to 0 and 1, where domains end."""
    step = _nearby(x.dtype)
    outward = torch.copysign(torch.full_like(x, step), x)
    borders = torch.full_like(x, step), x.sign() * (1 - step), torch.full_like(x, 1 + step)
    return [(x + outward, True), (x - outward, True), *((border, False) for border in borders)]


def _nearby(dtype: torch.dtype) -> float:
    return math.sqrt(torch.finfo(dtype).eps)


def _finite(x: Tensor) -> Tensor:
    return x.abs() <= torch.finfo(x.dtype).max


class _LedBack(Function):
    """The identity. Backward it also gives each input the gradient that leads its broken elements inward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, *led_and_inputs: Tensor) -> Tensor:
        return value.clone()  # a view could not be changed in place

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        count = len(inputs) // 3  # a slope, a direction and an input for each place, behind the value
        ctx.set_materialize_grads(False)  # where no gradient arrives, none is passed on
        ctx.save_for_backward(*inputs[1 : 1 + 2 * count])
        ctx.dtypes = [x.dtype for x in inputs[1 + 2 * count :]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        pulls: list[Tensor | None] = [None] * len(ctx.dtypes)
        led = ctx.saved_tensors
        for place, dtype in enumerate(ctx.dtypes) if grad is not None else ():
            slope, inward = led[2 * place : 2 * place + 2]
            pull = grad * slope  # a descent goes against it
            leads_in = (torch.sign(pull) * inward <= 0.0) & (slope != 0.0)  # no gradient where a NaN arrives
            limit = torch.finfo(dtype).max
            pulls[place] = torch.where(leads_in, pull, 0.0).clamp(-limit, limit).to(dtype)
        return grad, *[None] * len(led), *pulls
