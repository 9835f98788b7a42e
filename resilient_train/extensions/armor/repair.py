"""What a patched operation does: it computes what it always did, and then repairs what broke.

- A gradient of its inputs that is not finite becomes zero, unless the one that came to the operation was broken
  already: then something else is at fault, or the loss scale is too large, and that has to stay visible.
- Its result is repaired where it is not finite and no input was, element by element for pointwise operations, else for
  the call as a whole. So a mask's -inf stays what it is, and a NaN that was made earlier is not hidden.
- A NaN becomes 0. An infinity becomes the largest magnitude among the other results, with its sign: a value far beyond
  its neighbours drowns a sum, a loss, or the gradients of the weights behind it. Where no result is finite it becomes
  0. But a single number, which may be the loss, becomes a large one, so that the checks see that it broke.
- The gradient there is zero.

Nothing here waits for the device, looks at frames, or keeps anything from one call for the next: a checkpoint that
computes it a second time gets the same, and a compiler can trace all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import gt
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from resilient_train.extensions.armor.domains import Operation, call
from resilient_train.ground.operations import family, is_pointwise

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
    leaves = _spread(leaves) if rounds_exactly else leaves
    # The guard of the first is made last, so that gradients of an input given twice add up in their usual order.
    behind = [guarded(leaf) for leaf in reversed(leaves)][::-1]
    guarded_args, guarded_kwargs = tree_unflatten(behind, structure)

    def repair(value: Any) -> Any:
        if not is_repairable(value) or not value.numel():
            return value
        if value.requires_grad:
            given = [leaf for leaf in leaves if is_repairable(leaf) and leaf.device == value.device]
            value = _applied(_Witness, value, *given)
        still = value.detach()
        broken = broken_in(still)
        bound = _BOUND.get(still.dtype, _BOUND_OF_OTHERS)
        if sum(isinstance(leaf, Tensor) for leaf in leaves) == 1 and pointwise and still.numel() > 1:
            # These keep their order, `exp(95)` not below `exp(60)`, for a softmax by hand: the sum of all elements
            # along the last dimension is finite, though not its square.
            bound = max(bound, torch.finfo(still.dtype).max / (2 * still.shape[-1]))
        sizes = torch.nan_to_num(still.abs(), 0.0, 0.0)
        limit = torch.full_like(still, bound) if still.numel() == 1 else sizes.amax().clamp(max=bound)
        return torch.where(broken, torch.nan_to_num(torch.clamp(still, -limit, limit)), value)

    return tree_map(repair, call(bare, name, guarded_args, guarded_kwargs))


def _broken_by(leaves: Sequence[Any], pointwise: bool) -> Callable[[Tensor], Tensor]:
    """Return what says where a result, but no input, is not finite. In few passes over memory, which are the cost."""
    # Constants, too: `masked_fill(mask, -inf)`.
    constants = [torch.tensor(leaf, dtype=torch.float64) for leaf in leaves if isinstance(leaf, float)]
    numbers = [*(leaf.detach() for leaf in leaves if is_repairable(leaf)), *constants]
    nan, zeros = [leaf != leaf for leaf in numbers], [leaf - leaf for leaf in numbers]  # NaN, if not of finite ones
    if not pointwise:
        nan, zeros = [mask.any() for mask in nan], [zero.sum() for zero in zeros]
    is_finite = sum(zeros) == 0.0

    def broken(result: Tensor) -> Tensor:
        found: Tensor = reduce(gt, nan, result != result) | ((result.abs() == math.inf) & is_finite)
        return found

    return broken


def _spread(leaves: list[Any]) -> list[Any]:
    """Expand all tensors to the shape of the result, so that one element of a sum of gradients cannot spoil others."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if len({(leaf.dtype, leaf.device) for leaf in tensors}) > 1:
        return leaves  # expanded scalars would count more in the type of the result
    spread = iter(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]
    return [next(spread) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def guarded(leaf: Any) -> Any:
    """A tensor whose gradient becomes zero where it is not finite; what is none as it is."""
    return _applied(_Guard, leaf) if is_repairable(leaf) and leaf.requires_grad and torch.is_grad_enabled() else leaf


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
    """The identity. Backward it puts zero where a gradient is not finite."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)  # an input that got no gradient gets none: zeros would let its weight decay

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return torch.nan_to_num(gradient, 0.0, 0.0, 0.0) if gradient is not None else None


class _Witness(Function):
    """The identity. Backward it gives the inputs, past their guards, NaN where the arriving gradient is broken already,
    and zero elsewhere: through the graph, and not through memory that a second pass would find changed.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, *inputs: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.inputs = [(one.shape, one.dtype) for one in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return (None,) * (1 + len(ctx.inputs))
        lost = gradient - gradient
        spread = [lost if lost.shape == shape else lost.sum().expand(shape) for shape, _ in ctx.inputs]
        return (gradient, *[one.to(dtype) for one, (_, dtype) in zip(spread, ctx.inputs, strict=True)])
