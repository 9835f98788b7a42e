"""What a patched operation does: it computes what it always did, and then repairs what broke.

- A gradient of its inputs that is not finite becomes zero, unless the one that came to the operation was broken
  already: then something else is at fault, or the loss scale is too large, and that has to stay visible.
- Its result is repaired where it is not finite and no input was, element by element for pointwise operations, else for
  the call as a whole. So a mask's -inf stays what it is, and a NaN that was made earlier is not hidden.
- A NaN becomes 0. An infinity becomes the largest magnitude among the other results, with its sign: a value far beyond
  its neighbours drowns a sum, a loss, or the gradients of the weights behind it. Where no result is finite it becomes
  0. But a single number, which may be the loss, becomes a large one, so that the checks see that it broke.
- What is divided by one zero, such as a temperature that ran out, stays undivided: nothing is left to measure by.
- The gradient there is zero, or, for pointwise operations, one that leads back (`led_back`).

Nothing here waits for the device, looks at frames, or keeps anything from one call for the next: a checkpoint that
computes it a second time gets the same, and a compiler can trace all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add, gt
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from resilient_train.extensions.armor.domains import Operation, call
from resilient_train.extensions.armor.operations import family, is_pointwise, op_name

_STEEPEST = 1.0
_MOST = 2**20  # elements of a result: what is computed here takes several times its memory


def led_back(value: Tensor, broken: Tensor, bare: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the value of a pointwise operation with a gradient for what broke in it, unless a step aside breaks it."""
    places = [place for place, one in enumerate(args) if is_repairable(one)]
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
        points, lost = list(before), broken
        for place, x in enumerate(before):
            outward = torch.copysign(torch.full_like(x, _nearby(x.dtype)), x)
            for tried in (x + outward, x - outward):
                fine = lost & ~is_lost(evaluate([*points[:place], tried, *points[place + 1 :]]))
                points[place] = torch.where(fine, tried, points[place])
                lost = lost & ~fine
        moved = torch.stack([point != x for point, x in zip(points, before, strict=True)]).any(0)
        here, led = evaluate(points), []
        for place, (x, point) in enumerate(zip(before, points, strict=True)):
            inward = torch.sign(point - x)
            step = _nearby(x.dtype) * torch.clamp(point.abs(), min=1.0).sqrt()  # between rounding and curvature
            there = point + torch.copysign(step, torch.where(inward == 0.0, x, inward))
            rise = evaluate([*points[:place], there, *points[place + 1 :]]) - here
            slope = torch.nan_to_num(rise / (there - point), 0.0, 0.0, 0.0).clamp(-_STEEPEST, _STEEPEST)
            led += [torch.where(moved, slope, 0.0).to(value.dtype), inward.to(value.dtype)]
    inputs = [args[place].expand(value.shape) for place in places]
    return _LedBack.apply(value, *led, *inputs)  # type: ignore[no-any-return, no-untyped-call]


def _is_known_whole(broken: Tensor) -> bool:
    """Say whether nothing broke, on a CPU: elsewhere it would wait, and a compiler or transform cannot branch on it."""
    if broken.device.type != "cpu" or type(broken) is not Tensor or torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None and not bool(broken.any())


def _nearby(dtype: torch.dtype) -> float:
    return math.sqrt(torch.finfo(dtype).eps)


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


# A square of it, or a sum of billions, is finite; in float16, whose range is small, a sum of sixteen.
_BOUND = {torch.float16: 2.0**12}
_BOUND_OF_OTHERS = 2.0**48


def call_and_repair(bare: Operation, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation and repair what it broke, in its result and in the gradients of its inputs."""
    leaves, structure = tree_flatten((args, kwargs))
    if not any(isinstance(leaf, Tensor) for leaf in leaves) or kwargs.get("out") is not None:
        return bare(*args, **kwargs)
    pointwise = is_pointwise(name)
    broken_in = _broken_by(leaves, pointwise)
    # The results of the other operations depend in their last bit on how elements lie in memory.
    rounds_exactly = family(name) in ("add", "sub", "mul", "div")
    divides_by_one = op_name(name) == "div" and not name.startswith("__r") and len(args) > 1 and _is_number(args[1])
    leaves, flags = _guarded(_spread(leaves) if rounds_exactly else leaves)
    guarded_args, guarded_kwargs = tree_unflatten(leaves, structure)

    def repair(value: Any) -> Any:
        if not is_repairable(value) or not value.numel():
            return value
        if flags and value.requires_grad:
            value = _applied(_Witness, value, *flags)
        still = value.detach()
        broken = broken_in(still)
        bound = _bound(still, args, kwargs) if pointwise else _bound(still)
        limit = torch.full_like(still, _bound(still)) if still.numel() == 1 else _largest(still.abs(), bound)
        repaired = torch.where(broken, torch.nan_to_num(torch.clamp(still, -limit, limit)), value)
        if divides_by_one and still.numel() > 1:
            undivided = torch.broadcast_to(torch.as_tensor(args[0]), value.shape).to(value)
            whole = broken.all()
            repaired, broken = torch.where(whole, undivided, repaired), broken > whole
        return led_back(repaired, broken, bare, args, kwargs) if pointwise else repaired

    return tree_map(repair, call(bare, name, guarded_args, guarded_kwargs))


def _is_number(divisor: Any) -> bool:
    return not isinstance(divisor, Tensor) or (divisor.numel() == 1 and not divisor.requires_grad)


def _broken_by(leaves: Sequence[Any], pointwise: bool) -> Callable[[Tensor], Tensor]:
    """Return what says where a result, but no input, is not finite. In few passes over memory, which are the cost."""
    numbers = [leaf.detach() for leaf in leaves if is_repairable(leaf)]
    constants = [leaf for leaf in leaves if isinstance(leaf, float)]  # `masked_fill(mask, -inf)`
    nan, zeros = [leaf != leaf for leaf in numbers], [leaf - leaf for leaf in numbers]  # NaN, if not of finite ones
    if not pointwise:
        nan, zeros = [mask.any() for mask in nan], [zero.sum() for zero in zeros]
    masks: list[Tensor | bool] = [*nan, *[True] * any(map(math.isnan, constants))]
    finite: Tensor | bool = not any(map(math.isinf, constants))
    if zeros:
        finite = (reduce(add, zeros) == 0.0) & finite

    def broken(result: Tensor) -> Tensor:
        found = reduce(gt, masks, result != result)
        return found | ((result.abs() == math.inf) & finite)

    return broken


def _largest(sizes: Tensor, bound: float) -> Tensor:
    return torch.nan_to_num(sizes, 0.0, 0.0).amax().clamp(max=bound)


def _bound(value: Tensor, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> float:
    """Return how large a repaired element may be.

    The results of an operation on one tensor keep their order, `exp(95)` not below `exp(60)`, for a softmax by hand:
    there the bound is such that the sum of all elements along the last dimension is finite, though not its square.
    """
    bound = _BOUND.get(value.dtype, _BOUND_OF_OTHERS)
    if sum(isinstance(one, Tensor) for one in (*args, *(kwargs or {}).values())) != 1:
        return bound
    return max(bound, torch.finfo(value.dtype).max / (2 * (value.shape[-1] if value.dim() else 1)))


def _spread(leaves: list[Any]) -> list[Any]:
    """Expand all tensors to the shape of the result, so that one element of a sum of gradients cannot spoil others."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    first = tensors[0]
    if all(leaf.shape == first.shape for leaf in tensors):
        return leaves
    if any(leaf.dtype != first.dtype or leaf.device != first.device for leaf in tensors):
        return leaves  # expanded scalars would count more in the type of the result
    shape = torch.broadcast_shapes(*[leaf.shape for leaf in tensors])  # type: ignore[no-untyped-call]
    return [leaf.expand(shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _guarded(leaves: list[Any]) -> tuple[list[Any], list[Tensor]]:
    """Put a guard behind all inputs that a gradient flows to, except scalars on another device.

    That of the first input is made last, so that gradients of an input given twice add up in their usual order.
    """
    places = [
        place
        for place, leaf in enumerate(leaves)
        if is_repairable(leaf) and leaf.requires_grad and torch.is_grad_enabled()
    ]
    wide = [place for place in places if leaves[place].dim()] or places
    behind, flags = list(leaves), []
    for place in reversed(places):
        if leaves[place].device == leaves[wide[0]].device:
            behind[place], flag = _applied(_Guard, leaves[place])
            flags.append(flag)
    return behind, flags


def guarded(value: Tensor) -> Tensor:
    """A tensor whose gradient becomes zero where it is not finite."""
    behind: Tensor = _applied(_Guard, value)[0] if value.requires_grad and torch.is_grad_enabled() else value
    return behind


def is_lost(x: Tensor) -> Tensor:
    """Say what is not finite. On a CPU `isfinite` takes three times as long."""
    return ~(x.abs() <= torch.finfo(x.dtype).max)


def is_repairable(leaf: Any) -> bool:
    """Say whether it is a tensor in which torch can look for NaNs: not complex, sparse or of 8-bit numbers."""
    return (
        isinstance(leaf, Tensor)
        and leaf.is_floating_point()
        and leaf.layout is torch.strided
        and leaf.element_size() > 1
    )


def _applied(function: type[Function], *args: Any) -> Any:
    return function.apply(*args)  # type: ignore[no-untyped-call]


class _Guard(Function):
    """The identity. Backward it puts zero where a gradient is not finite, unless the witness says it arrived so."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor) -> tuple[Tensor, Tensor]:
        return value.view_as(value), torch.zeros((), device=value.device)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)  # an input that got no gradient gets none: zeros would let its weight decay

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, flag: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        finite = torch.nan_to_num(gradient, 0.0, 0.0, 0.0)
        return finite if flag is None else torch.where(flag == 0.0, finite, gradient)


class _Witness(Function):
    """The identity. Backward it reports whether the arriving gradient is broken, as the gradient of the guards' flags:
    through the graph, and not through memory that a second pass would find changed.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, *flags: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.flags = len(inputs) - 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return (None,) * (1 + ctx.flags)
        flag = (gradient - gradient).sum().float()  # zero, or NaN
        return (gradient, *[flag] * ctx.flags)
