"""What a patched operation does: it computes what it always did, and then repairs what broke.

- A gradient of its inputs that is not finite becomes zero, unless the one that came to the operation was broken
  already: then something else is at fault, or the loss scale is too large, and that has to stay visible.
- Its result is repaired where it is not finite and no input was, element by element for pointwise operations, else for
  the call as a whole. So a mask's -inf stays what it is, and a NaN that was made earlier is not hidden.
- A NaN becomes 0. An infinity becomes the largest magnitude among the other results, with its sign: a value far beyond
  its neighbours drowns a sum, a loss, or the gradients of the weights behind it. Where no result is finite it becomes
  0. But a single number, which may be the loss, becomes a large one, so that the checks see that it broke.
- The gradient there is zero, or, for pointwise operations, one that leads back (`led_back`).
- A NaN that the program gives as a constant, to an operation that puts it in, is 0: `torch.where(seen, x, nan)`.
- An operation that raises outside of its domain gets the nearest input inside, if it cannot take its own (`call`).

Nothing here waits for the device, looks at frames, or keeps anything from one call for the next: a checkpoint that
computes it a second time gets the same, and a compiler can trace all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add, gt
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributions import Distribution, constraints
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from resilient_train.ground.errors import text_of
from resilient_train.ground.operations import GIVE, family, is_pointwise

Operation = Callable[..., Any]

_OF_CHANCES = (  # what is said of those that are none
    "invalid multinomial distribution",
    "probability tensor contains",
    "all elements of input should be between 0 and 1",
)
_TRIED = 4  # distances from the border, each a hundred times the one before
_MOST = 2**20  # elements of a result: what is computed here takes several times its memory


def led_back(value: Tensor, broken: Tensor, bare: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the value of a pointwise operation with a gradient for what broke in it, unless a step aside breaks it."""
    places = [place for place, one in enumerate(args) if is_repairable(one)]
    if not torch.is_grad_enabled() or not any(args[place].requires_grad for place in places):
        return value
    if any(isinstance(one, Tensor) for one in kwargs.values()) or broken.numel() > _MOST:
        return value
    with torch.no_grad():
        taken = [one.detach().expand(broken.shape) if isinstance(one, Tensor) else one for one in args]

        def evaluate(points: list[Any], place: int, x: Tensor) -> Tensor:
            return bare(*points[:place], x, *points[place + 1 :], **kwargs)  # type: ignore[no-any-return]

        points, lost = list(taken), broken
        for place in places:
            x = taken[place]
            outward = torch.copysign(torch.full_like(x, _nearby(x.dtype)), x)
            for tried in (x + outward, x - outward):
                fine = lost & ~is_lost(evaluate(points, place, tried))
                points[place] = torch.where(fine, tried, points[place])
                lost = lost & ~fine
        here, moved = bare(*points, **kwargs), broken & ~lost
    for place in places:
        with torch.no_grad():
            x, point = taken[place], points[place]
            inward = torch.sign(point - x)
            step = _nearby(x.dtype) * torch.clamp(point.abs(), min=1.0).sqrt()  # between rounding and curvature
            there = point + torch.copysign(step, torch.where(inward == 0.0, x, inward))
            rise = evaluate(points, place, there) - here
            slope = torch.nan_to_num(rise / (there - point), 0.0, 0.0, 0.0).clamp(-1.0, 1.0)
            slope = torch.where(moved, slope, 0.0).to(value.dtype)
        value = value + _applied(_LedBack, args[place].expand(value.shape), slope, inward)
    return value


def _nearby(dtype: torch.dtype) -> float:
    return math.sqrt(torch.finfo(dtype).eps)


class _LedBack(Function):
    """Zeros. Backward it gives an input the gradient that leads its broken elements inward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, slope: Tensor, inward: Tensor) -> Tensor:
        return torch.zeros_like(slope)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)  # where no gradient arrives, none is passed on
        ctx.save_for_backward(*inputs[1:])
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None
        slope, inward = ctx.saved_tensors
        pull = grad * slope  # a descent goes against it
        leads_in = (torch.sign(pull) * inward <= 0.0) & (slope != 0.0)  # no gradient where a NaN arrives
        return torch.where(leads_in, pull, 0.0).to(ctx.dtype), None, None


# What stands for a single infinite number: a square of it is finite, and a sum of billions.
_LARGE = {torch.float16: 2.0**12}
_LARGE_OF_OTHERS = 2.0**48


def call_and_repair(bare: Operation, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation and repair what it broke, in its result and in the gradients of its inputs."""
    if name in GIVE:
        args, kwargs = tree_map(_without_nan, (args, kwargs))
    leaves, structure = tree_flatten((args, kwargs))
    if not any(isinstance(leaf, Tensor) for leaf in leaves) or kwargs.get("out") is not None:
        return bare(*args, **kwargs)
    pointwise = is_pointwise(name)
    broken_in = _broken_by(leaves, pointwise)
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
        if still.numel() == 1:
            limit = torch.full_like(still, _LARGE.get(still.dtype, _LARGE_OF_OTHERS))
        else:  # so that a sum along the last dimension is finite, and none is below a healthy one
            bound = torch.finfo(still.dtype).max / (2 * still.shape[-1])
            limit = torch.nan_to_num(still.abs(), 0.0, 0.0).amax().clamp(max=bound)
        repaired = torch.where(broken, torch.nan_to_num(torch.clamp(still, -limit, limit)), value)
        return led_back(repaired, broken, bare, args, kwargs) if pointwise else repaired

    return tree_map(repair, call(bare, name, guarded_args, guarded_kwargs))


def _without_nan(leaf: Any) -> Any:
    """Return 0 for a number that is NaN, or a tensor of one that nothing learns."""
    if is_repairable(leaf) and leaf.numel() == 1 and not leaf.requires_grad:
        return leaf.nan_to_num(0.0, math.inf, -math.inf)
    return 0.0 if isinstance(leaf, float) and leaf != leaf else leaf


def _broken_by(leaves: Sequence[Any], pointwise: bool) -> Callable[[Tensor], Tensor]:
    """Return what says where a result, but no input, is not finite. In few passes over memory, which are the cost."""
    numbers: list[Any] = [leaf.detach() for leaf in leaves if is_repairable(leaf)]
    if pointwise:
        numbers += [leaf for leaf in leaves if isinstance(leaf, float)]  # `masked_fill(mask, -inf)`
    nan, zeros = [one != one for one in numbers], [one - one for one in numbers]  # NaN, if not of finite ones
    if not pointwise:
        nan, zeros = [mask.any() for mask in nan], [zero.sum() for zero in zeros]

    def broken(result: Tensor) -> Tensor:
        is_new = reduce(gt, nan, result != result)
        return is_new | ((result.abs() == math.inf) & (reduce(add, zeros, 0.0) == 0.0))

    return broken


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


def call(bare: Operation, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation; where it does not take its first input, change that."""
    try:
        return bare(*args, **kwargs)
    except RuntimeError as error:
        move = _MOVES.get(family(name))
        if move is None or not has_value(error) or not args or not isinstance(args[0], Tensor):
            raise
    return bare(move(args[0]), *args[1:], **kwargs)


def has_value(error: BaseException) -> bool:
    """Say whether `call` has a value where this was raised; of a matrix by the operation that its text begins with."""
    text = text_of(error).removeprefix("torch.")
    if isinstance(error, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return family(text.partition(":")[0].replace(".", "_")) in _MOVES
    return text.startswith(_OF_CHANCES)


def _chances(given: Tensor) -> Tensor:
    """What can be drawn from: no chance is below 0, and all are alike where nothing is above it."""
    chances = torch.where(given > 0.0, given.detach(), 0.0)  # NaN is not
    return torch.where(chances.sum(-1, keepdim=True) > 0.0, chances, 1.0)


def _inside(attempt: Operation, matrices: Tensor) -> Tensor:
    """Add to each matrix that fails as much of the identity as it takes."""
    with torch.no_grad():
        still = matrices.detach()
        one = torch.eye(still.shape[-1], dtype=still.dtype, device=still.device)
        size = still.abs().amax((-2, -1), keepdim=True)
        near = math.sqrt(torch.finfo(still.dtype).eps)
        distance, added = near * torch.where(size > 0, size, 1.0), torch.zeros_like(size)
        for _ in range(_TRIED):
            fails = attempt(still + added * one)[1][..., None, None] != 0
            added = torch.where(fails, distance, added)
            distance = 100 * distance
    return matrices + added * one


_MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "cholesky": partial(_inside, torch.linalg.cholesky_ex),
    "inverse": partial(_inside, torch.linalg.inv_ex),
    "solve": partial(_inside, torch.linalg.inv_ex),
    "multinomial": _chances,
    "binary_cross_entropy": partial(torch.clamp, min=0.0, max=1.0),
}


def call_distribution(called: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a distribution, or call a method of one; what its checks refuse is moved to where they accept it."""
    try:
        return called(*args, **kwargs)
    except ValueError:
        owner: Any = getattr(called, "__self__", None)
        if owner is not None:
            return called(*[_moved(value, owner.support) for value in args], **kwargs)
        kind: Any = called
        names = kind.__init__.__code__.co_varnames[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return kind(**{name: _moved(value, kind.arg_constraints.get(name)) for name, value in given.items()})


def is_distribution(called: Any) -> bool:
    """Say whether it is a class of torch.distributions, or a method of such an object."""
    if isinstance(called, type):
        return issubclass(called, Distribution) and called.__module__.startswith("torch.distributions.")
    return isinstance(getattr(called, "__self__", None), Distribution)


def _moved(value: Any, limit: Any) -> Any:
    """Move the elements that a constraint refuses inside of its borders, or a matrix as a whole; NaN stays, and so do
    vectors, of which no element alone is refused, and counts.
    """
    if not isinstance(value, Tensor):
        return value
    if isinstance(limit, type(constraints.positive_definite)):
        return _inside(torch.linalg.cholesky_ex, (value + value.mT) / 2)
    if not hasattr(limit, "lower_bound") or limit.is_discrete:
        return value
    still, near = value.detach(), math.sqrt(torch.finfo(value.dtype).eps)
    bounds = limit.lower_bound, getattr(limit, "upper_bound", math.inf)
    lower, upper = (torch.as_tensor(bound, dtype=still.dtype, device=still.device) for bound in bounds)
    away = near * (upper - lower).clamp(max=1.0)
    inside = torch.where(limit.check(still) | still.isnan(), still, still.clamp(lower + away, upper - away))
    finite = value.nan_to_num(0.0, 0.0, 0.0)
    return inside + (finite - finite.detach())  # with the gradient of what was there, which can learn to return
