"""What a patched operation does: what it always did, and then it repairs what it broke.

Where there is a safe operation, that is called in its place. Any other operation goes through the general form:

- Its inputs pass through an identity whose backward pass puts zero where a slope is not finite, unless the slope that
  came to the operation was broken already: then something else is at fault, or the loss scale is too large, and that
  has to stay visible.
- Its result is repaired where it is not finite and no input was: a NaN where no input is NaN, an infinity where none is
  infinite. Element by element for pointwise operations, else for the call as a whole. So a mask's -inf stays what it
  is, and a NaN that was made earlier is not hidden.
- A NaN becomes 0. An infinity becomes, with its sign, the largest magnitude among the operation's other results: as
  large as it can be without standing out, since a value far beyond its neighbours drowns a sum, a loss, or the slopes
  of the weights behind it. It is bounded, so that sums and squares of it stay finite. Where no result is finite there
  is nothing to measure by, and it becomes 0. But a single number, which may be the loss, becomes that bound, so that
  the checks see that it broke.
- The slope there is zero, or, for pointwise operations, one that leads back (recovery_gradients.py). Everything else is
  as the operation made it, bit for bit.

Nothing here waits for the device, looks at frames, or keeps anything from one call for the next: it gives the same when
it is computed a second time for a checkpoint, and a compiler can trace all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from resilient_train.numerics.operations import family, is_logarithm, is_pointwise, rounds_exactly
from resilient_train.numerics.recovery_gradients import recovery_gradients

Operation = Callable[..., Any]

# A square of it, or a sum of billions, is finite; in float16, whose range is small, a sum of sixteen.
_BOUND = {torch.float16: 2.0**12}
_BOUND_OF_OTHERS = 2.0**48


def call_safe(safe: Operation, bare: Operation, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a safe operation; its value at a pole must not stand out among what torch computes.

    The value at eps from the pole of a quotient is ten million times that of its neighbours. A logarithm's is no more
    than 36, and says how unlikely something is: it stays.
    """
    result = safe(*args, **kwargs)
    if not is_pointwise(name) or not isinstance(result, Tensor) or not _is_repairable(result) or not result.numel():
        return result
    with torch.no_grad():
        still = bare(*args, **kwargs)
    size = still.abs()
    infinite = size == math.inf
    inputs = _BrokenInputs([*args, *kwargs.values()], pointwise=True)
    broken = (still != still) | (infinite & inputs.finite)
    has_slope = family(name) == "exp"  # beyond its range, for a reason of its own
    back = recovery_gradients(bare, args, kwargs, broken, broken & infinite, tries=not has_slope)
    if not is_logarithm(name) and result.numel() > 1:
        largest = _largest(size, _room(size) if _is_of_one(args, kwargs) else None)
        replaced = back.like_others if back is not None and has_slope else torch.zeros_like(broken)
        result = _applied(_Limited, result, still, broken, infinite > broken, largest, replaced)
    return result if back is None else back.attach_to(result)


def call_and_repair(bare: Operation, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation and repair what it broke, in its result and in the slopes of its inputs."""
    leaves, structure = tree_flatten((args, kwargs))
    if not any(isinstance(leaf, Tensor) for leaf in leaves) or kwargs.get("out") is not None:
        return bare(*args, **kwargs)
    inputs, given = _BrokenInputs(leaves, is_pointwise(name)), (args, kwargs)
    leaves, flags = _guarded(_spread(leaves) if rounds_exactly(name) else leaves)
    args, kwargs = tree_unflatten(leaves, structure)

    def repair(value: Any) -> Any:
        if not isinstance(value, Tensor) or not _is_repairable(value) or not value.numel():
            return value
        if flags and value.requires_grad:
            value = _applied(_Witness, value, *flags)
        broken = _broken(value, inputs)
        back, bound = None, None
        if is_pointwise(name):
            back = recovery_gradients(bare, *given, broken, broken & (value.detach().abs() == math.inf))
            bound = _room(value) if _is_of_one(*given) else None
        value = _repaired(value, broken, bound)
        return value if back is None else back.attach_to(value)

    return tree_map(repair, bare(*args, **kwargs))


class _BrokenInputs:
    """What was not finite before an operation, and is not its fault. In few passes over memory, which are the cost."""

    def __init__(self, leaves: Sequence[Any], pointwise: bool) -> None:
        numbers = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor) and _is_repairable(leaf)]
        constants = [leaf for leaf in leaves if isinstance(leaf, float)]  # `masked_fill(mask, -inf)`
        nan, zeros = [leaf != leaf for leaf in numbers], [leaf - leaf for leaf in numbers]  # NaN, if not of finite ones
        if not pointwise:
            nan, zeros = [mask.any() for mask in nan], [zero.sum() for zero in zeros]
        self.nan: list[Tensor | bool] = [*nan, *[True] * any(map(math.isnan, constants))]
        self.finite: Tensor | bool = not any(map(math.isinf, constants))
        if zeros:
            self.finite = (reduce(add, zeros) == 0.0) & self.finite


def _largest(size: Tensor, bound: float | None = None) -> Tensor:
    """Return the largest of some magnitudes that is finite, within the bound."""
    return torch.nan_to_num(size, 0.0, 0.0).amax().clamp(max=_bound(size.dtype) if bound is None else bound)


def _room(value: Tensor) -> float:
    """Return how large all elements along the last dimension may be so that their sum is finite.

    The results of one input keep its order, `exp(95)` not below `exp(60)`: a softmax by hand would choose the wrong
    one. So there the size of the others counts for more than a finite square.
    """
    count = value.shape[-1] if value.dim() else 1
    return max(_bound(value.dtype), torch.finfo(value.dtype).max / (2 * count))


def _is_of_one(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return sum(isinstance(one, Tensor) for one in (*args, *kwargs.values())) == 1


def _bound(dtype: torch.dtype) -> float:
    return _BOUND.get(dtype, _BOUND_OF_OTHERS)


def _broken(value: Tensor, inputs: _BrokenInputs) -> Tensor:
    """Say where there is a NaN that no input had, or an infinity though all inputs were finite."""
    still = value.detach()
    broken = still != still
    for mask in inputs.nan:
        broken = broken > mask
    return broken | ((still.abs() == math.inf) & inputs.finite)


def _repaired(value: Tensor, broken: Tensor, bound: float | None) -> Tensor:
    still = value.detach()
    size = still.abs()
    large = torch.full_like(size, _bound(size.dtype)) if size.numel() == 1 else _largest(size, bound)
    return torch.where(broken, torch.nan_to_num(torch.clamp(still, -large, large)), value)


def _spread(leaves: list[Any]) -> list[Any]:
    """Expand all tensors to the shape of the result, so that one element of a sum of slopes does not spoil the others.

    Only for operations whose last bit does not depend on how the elements lie in memory.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    first = tensors[0]
    if all(leaf.shape == first.shape for leaf in tensors):
        return leaves
    if any(leaf.dtype != first.dtype or leaf.device != first.device for leaf in tensors):
        return leaves  # expanded scalars would count more in the type of the result
    shape = torch.broadcast_shapes(*[leaf.shape for leaf in tensors])  # type: ignore[no-untyped-call]
    return [leaf.expand(shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _guarded(leaves: list[Any]) -> tuple[list[Any], list[Tensor]]:
    """Put a guard behind all inputs that a slope flows to, except scalars on another device.

    An input that is given twice has two guards, the first one made last: so slopes add up in their usual order.
    """
    places = [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and _is_repairable(leaf) and leaf.requires_grad and torch.is_grad_enabled()
    ]
    wide = [place for place in places if leaves[place].dim()] or places
    places = [place for place in places if leaves[place].device == leaves[wide[0]].device]
    again = [sum(leaves[place] is leaves[other] for other in places if other < place) for place in places]
    behind, flags = list(leaves), []
    for time in range(max(again, default=-1), -1, -1):
        chosen = [place for place, count in zip(places, again, strict=True) if count == time]
        *guarded, flag = _applied(_Guard, *[leaves[place] for place in chosen])
        for place, leaf in zip(chosen, guarded, strict=True):
            behind[place] = leaf
        flags.append(flag)
    return behind, flags


def _is_repairable(leaf: Any) -> bool:
    """Say whether torch can look for NaNs in a tensor: it is not complex, sparse or of 8-bit numbers."""
    return leaf.is_floating_point() and leaf.layout is torch.strided and leaf.element_size() > 1


def _applied(function: type[Function], *args: Any) -> Any:
    return function.apply(*args)  # type: ignore[no-untyped-call]


class _Limited(Function):
    """Limits the magnitude of what is broken; infinities that come of infinite inputs stay torch's.

    The slope is that of the safe operation, except where another replaces it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(safe: Tensor, bare: Tensor, broken: Tensor, old: Tensor, limit: Tensor, replaced: Tensor) -> Tensor:
        return torch.where(broken, torch.clamp(safe, -limit, limit), torch.where(old, bare, safe))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[-1])

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        (replaced,) = ctx.saved_tensors
        return torch.where(replaced, 0.0, slope), None, None, None, None, None


class _Guard(Function):
    """The identity. Backward it puts zero where a slope is not finite, unless the witness says that it arrived so."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        flag = torch.zeros((), device=inputs[0].device)
        return *(value.view_as(value) for value in inputs), flag

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)  # an input that got no gradient gets none: zeros would let its weight decay

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> Any:
        *slopes_of_inputs, flag = slopes
        return tuple(None if slope is None else _finite(slope, flag) for slope in slopes_of_inputs)


def _finite(slope: Tensor, flag: Tensor | None) -> Tensor:
    finite = torch.nan_to_num(slope, 0.0, 0.0, 0.0)
    return finite if flag is None else torch.where(flag == 0.0, finite, slope)


class _Witness(Function):
    """The identity. Backward it reports whether the arriving slope is broken, as the slope of the guard's flags.

    So the report travels through the graph, and not through memory that a second pass would find changed.
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
    def backward(ctx: Any, slope: Tensor | None) -> Any:
        if slope is None:
            return (None,) * (1 + ctx.flags)
        flag = (slope - slope).sum().float()  # zero, or NaN
        return (slope, *[flag] * ctx.flags)
