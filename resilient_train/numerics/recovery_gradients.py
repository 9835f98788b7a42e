"""The slope that leads a broken element back to where its operation works.

What an operation breaks for good, in every batch, is mostly where a learned number has moved to: a power that starts on
the pole, scores that have grown beyond the range. With a slope of zero it would stay there for the rest of the run. So
an element that broke learns as if it were at a working point nearby:

- at a pole, at a point a step away from it. The slope there is steep only because the step is small, and counts as 1 at
  most, so that nothing else pays for it; that of an input that stays where it is, as the others' at most;
- where an operation on one tensor overflows, at the nearest of the inputs that did not: the slope there is one that the
  optimizer meets anyway;
- beyond the border of a domain it has none, as behind a `clamp`, unless no element at all worked: then nothing else
  would teach what is to be learned.

Compiled code does so for small tensors only, which learned numbers mostly are; in large ones the slope stays zero.

And the slope only ever leads inward: one that would take the element farther out becomes zero. All of this is computed
from values, so no table of derivatives is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_FAR = 2.0**10  # from a border: that is no overflow
_STEEPEST = 1.0
_MOST = 1024  # broken elements of a call that are led back

Evaluate = Callable[[list[Tensor]], Tensor]


class _Sample:
    """The elements that are looked at: all of a small tensor, up to `_MOST` broken and working ones of a large one.

    Nothing waits for the device to count them. Of an operation that breaks more elements at once the first are led
    back, and the others follow.
    """

    def __init__(self, broken: Tensor) -> None:
        self.shape = broken.shape
        self.chosen: Tensor | None = None
        if broken.numel() > 2 * _MOST and torch._C._functorch.peek_interpreter_stack() is None:
            flat = broken.reshape(-1)
            first = [torch.nonzero_static(mask, size=_MOST, fill_value=0).squeeze(1) for mask in (flat, ~flat)]
            self.chosen = torch.cat(first)

    def of(self, x: Tensor) -> Tensor:
        wide = x.detach().expand(self.shape)
        return wide if self.chosen is None else wide.reshape(-1)[self.chosen]


@dataclass(slots=True)
class RecoveryGradients:
    """The working point for each broken element, as the values of the floating-point inputs."""

    inputs: list[Tensor]  # as they are
    sample: _Sample
    before: list[Tensor]  # the sampled elements of the inputs
    points: list[Tensor]  # the same where nothing broke
    broken: Tensor
    others: Tensor  # points that were taken from an input that did not break
    evaluate: Evaluate

    @property
    def like_others(self) -> Tensor:
        """Say which elements of all learn as one that did not break."""
        return _scattered(self.others, self.sample.chosen, self.sample.shape)

    def attach_to(self, value: Tensor) -> Tensor:
        """Return the value with the slopes that lead back."""
        with torch.no_grad():
            here = self.evaluate(self.points)
            led = [one.to(value.dtype) for place in range(len(self.points)) for one in self._slope(place, here)]
        inputs = [one.expand(value.shape) for one in self.inputs]
        return _LedBack.apply(value, self.sample.chosen, *led, *inputs)  # type: ignore[no-any-return, no-untyped-call]

    def _slope(self, place: int, here: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slope at the point, zero where nothing broke, and which way is inward."""
        x, point = self.before[place], self.points[place]
        inward = torch.sign(point - x)
        step = _nearby(x.dtype) * torch.clamp(point.abs(), min=1.0).sqrt()  # between rounding and curvature
        there = list(self.points)
        there[place] = point + torch.copysign(step, torch.where(inward == 0.0, x, inward))
        step = there[place] - point
        slope = torch.nan_to_num((self.evaluate(there) - here) / step, 0.0, 0.0, 0.0)
        moved = torch.stack([p != one for p, one in zip(self.points, self.before, strict=True)]).any(0)
        usual = torch.where(moved | self.broken, 0.0, slope.abs()).amax().clamp(min=_STEEPEST)
        limit = torch.where(inward == 0.0, usual, _STEEPEST)
        return torch.where(moved, torch.where(self.others, slope, slope.clamp(-limit, limit)), 0.0), inward


def recovery_gradients(
    bare: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    broken: Tensor,
    overflown: Tensor,
    *,
    tries: bool = True,
) -> RecoveryGradients | None:
    """Look for working points of a pointwise operation; None where no slope is needed.

    Of what is broken some is overflown: infinite. `tries` says whether to look next to poles and borders as well.
    """
    places = [
        place
        for place, one in enumerate(args)
        if isinstance(one, Tensor)
        and one.is_floating_point()
        and one.layout is torch.strided
        and one.element_size() > 1
    ]
    if not torch.is_grad_enabled() or not any(args[place].requires_grad for place in places):
        return None
    if any(isinstance(one, Tensor) for one in kwargs.values()) or _is_known_whole(broken):
        return None
    if torch.compiler.is_compiling() and broken.numel() > 2 * _MOST:
        return None  # a sample would cut the fused kernels apart, 5 ms for each operation
    with torch.no_grad():
        sample = _Sample(broken)
        taken = [sample.of(one) if isinstance(one, Tensor) else one for one in args]

        def evaluate(values: list[Tensor]) -> Tensor:
            filled = list(taken)
            for place, one in zip(places, values, strict=True):
                filled[place] = one
            return bare(*filled, **kwargs)  # type: ignore[no-any-return]

        before, inputs = [taken[place] for place in places], [args[place] for place in places]
        lost, overflown = sample.of(broken), sample.of(overflown)
        points, others = list(before), torch.zeros_like(lost)
        if len(points) == 1:
            nearest = _nearest_of_others(before[0], inputs[0].detach(), broken)
            others = overflown & _finite(nearest) & _finite(evaluate([nearest]))
            points = [torch.where(others, nearest, before[0])]
        if tries:
            others = _moved_to_poles(before, points, lost, others, broken.all(), evaluate)
    return RecoveryGradients(inputs, sample, before, points, lost, others, evaluate)


def _moved_to_poles(
    before: list[Tensor], points: list[Tensor], lost: Tensor, others: Tensor, alone: Tensor, evaluate: Evaluate
) -> Tensor:
    """Move points next to a pole or a border where that is nearer; return which are still taken from others."""
    for place, x in enumerate(before):
        for tried, is_next_to in _candidates(x):
            may = lost & (is_next_to | (alone & (x.abs() < _FAR)))
            fine = may & _finite(evaluate([*points[:place], tried, *points[place + 1 :]]))
            fine = fine & (~others | ((tried - x).abs() < (points[place] - x).abs()))
            points[place] = torch.where(fine, tried, points[place])
            lost, others = lost & ~fine, others & ~fine
    return others


def _is_known_whole(broken: Tensor) -> bool:
    """Say whether nothing broke, where that takes no more than one pass: on a CPU in eager mode.

    Elsewhere it would wait for the device, and a compiler or transform cannot branch on it.
    """
    if broken.device.type != "cpu" or type(broken) is not Tensor or torch.compiler.is_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return not bool(broken.any())


def _nearest_of_others(x: Tensor, all_of_x: Tensor, broken: Tensor) -> Tensor:
    """Return the nearest of the inputs that did not break; where there is none, an infinity."""
    left_out = broken | ~_finite(all_of_x)
    low = torch.where(left_out, torch.inf, all_of_x).amin()
    high = torch.where(left_out, -torch.inf, all_of_x).amax()
    return torch.where(low <= high, x.clamp(low, high), torch.inf)


def _candidates(x: Tensor) -> list[tuple[Tensor, bool]]:
    """A step outward and inward, which are next to it, then next to 0 and 1, where domains end."""
    step = _nearby(x.dtype)
    outward = torch.copysign(torch.full_like(x, step), x)
    borders = torch.full_like(x, step), x.sign() * (1 - step), torch.full_like(x, 1 + step)
    return [(x + outward, True), (x - outward, True), *((border, False) for border in borders)]


def _scattered(x: Tensor, chosen: Tensor | None, shape: torch.Size) -> Tensor:
    """Put what was found for a sample back into its places, among zeros."""
    return x if chosen is None else x.new_zeros(shape.numel()).scatter(0, chosen, x).view(shape)


def _nearby(dtype: torch.dtype) -> float:
    return math.sqrt(torch.finfo(dtype).eps)


def _finite(x: Tensor) -> Tensor:
    return x.abs() <= torch.finfo(x.dtype).max


class _LedBack(Function):
    """The identity. Backward it also gives each input the slope that leads its broken elements inward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, chosen: Tensor | None, *slopes_and_inputs: Tensor) -> Tensor:
        return value.clone()  # a view could not be changed in place

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, chosen, *rest = inputs
        count = len(rest) // 3
        ctx.set_materialize_grads(False)  # where no gradient arrives, none is passed on
        ctx.save_for_backward(chosen, *rest[: 2 * count])
        ctx.dtypes = [x.dtype for x in rest[2 * count :]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        count = len(ctx.dtypes)
        pulls: list[Tensor | None] = [None] * count
        if grad is not None:
            chosen, *led = ctx.saved_tensors
            taken = grad if chosen is None else grad.reshape(-1)[chosen]
            for place, dtype in enumerate(ctx.dtypes):
                slope, inward = led[2 * place : 2 * place + 2]
                pull = taken * slope  # a descent goes against it
                leads_in = (torch.sign(pull) * inward <= 0.0) & (slope != 0.0)  # a NaN that arrives: nowhere
                limit = torch.finfo(dtype).max
                pull = torch.where(leads_in, pull, 0.0).clamp(-limit, limit).to(dtype)
                pulls[place] = _scattered(pull, chosen, grad.shape)
        return grad, None, *[None] * (2 * count), *pulls
