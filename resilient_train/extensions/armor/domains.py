"""Operations that raise outside of their domain: a patch gives their value at the nearest point inside, and its
gradient. Only inputs that a call could not take are changed, and only where it cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from resilient_train.ground.errors import text_of
from resilient_train.ground.operations import family

Operation = Callable[..., Any]

_OF_CHANCES = (  # what is said of those that are none
    "invalid multinomial distribution",
    "probability tensor contains",
    "all elements of input should be between 0 and 1",
)
_TRIED = 4  # distances from the border, each a hundred times the one before


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
    return inside + (finite - finite.detach())  # with the gradient of what was there, which can learn to come back
