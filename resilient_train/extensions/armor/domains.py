"""Operations that raise outside of their domain: a patch gives their value at the nearest point inside, and its
gradient. Only inputs that a call could not take are changed, and only where it cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from resilient_train.ground.errors import text_of
from resilient_train.ground.operations import family, op_name

Operation = Callable[..., Any]

_OF_MATRICES = {"cholesky": torch.linalg.cholesky_ex, "inverse": torch.linalg.inv_ex, "solve": torch.linalg.inv_ex}
_LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]
_OF_CHANCES = (  # what is said of those that are none
    "invalid multinomial distribution",
    "probability tensor contains",
    "all elements of input should be between 0 and 1",
)
_TRIED = 4  # distances from the border, each a hundred times the one before


def call(bare: Operation, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation; where it does not take its first input, change that."""
    if op_name(name) == "binary_cross_entropy":  # a GPU does not raise beyond 0 and 1, but fails for good
        return _of_chances(bare, *args, **kwargs)
    try:
        return bare(*args, **kwargs)
    except RuntimeError as error:
        attempt = _OF_MATRICES.get(family(name)) if isinstance(error, _LinAlgError) else None
        is_drawn = family(name) == "multinomial"
        if not args or not isinstance(args[0], Tensor) or (attempt is None and not is_drawn):
            raise
    given = _chances(args[0]) if attempt is None else _inside(args[0], attempt)
    return bare(given, *args[1:], **kwargs)


def has_value(error: BaseException) -> bool:
    """Say whether `call` has a value where this was raised; of a matrix by the operation that its text begins with."""
    text = text_of(error).removeprefix("torch.")
    if isinstance(error, _LinAlgError):
        return family(text.partition(":")[0].replace(".", "_")) in _OF_MATRICES
    return text.startswith(_OF_CHANCES)


def _of_chances(bare: Operation, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The cross entropy of numbers that are held within 0 and 1; with a NaN among them it is NaN."""
    loss = bare(input.nan_to_num(0.5, 1.0, 0.0).clamp(0.0, 1.0), *args, **kwargs)
    lost = input.isnan() if loss.shape == input.shape else input.isnan().any()
    return loss.masked_fill(lost, math.nan)


def _chances(given: Tensor) -> Tensor:
    """What can be drawn from: what was infinite, if anything was; and all alike where nothing is above 0."""
    still = given.detach()
    infinite = still == torch.inf
    chances = torch.where(infinite.any(-1, keepdim=True), infinite.to(still.dtype), still)
    chances = torch.where(chances > 0.0, chances, 0.0)  # NaN is not
    return torch.where(chances.sum(-1, keepdim=True) > 0.0, chances, 1.0)


def _inside(matrices: Tensor, attempt: Operation) -> Tensor:
    """Add to each matrix that fails as much of the identity as it takes."""
    with torch.no_grad():
        still = matrices.detach()
        one = torch.eye(still.shape[-1], dtype=still.dtype, device=still.device)
        size = still.abs().amax((-2, -1), keepdim=True)
        usual = size[size > 0].median() if bool((size > 0).any()) else size.new_ones(())
        near = math.sqrt(torch.finfo(still.dtype).eps)
        size = torch.where(size > 0, size, usual / near)  # one of zeros is as others are
        distance, added = near * size, torch.zeros_like(size)
        for _ in range(_TRIED):
            fails = attempt(still + added * one)[1][..., None, None] != 0
            added = torch.where(fails, distance, added)
            distance = 100 * distance
    return matrices + added * one


def call_distribution(called: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a distribution, or call a method of one; what its checks refuse is moved to where they accept it."""
    try:
        return called(*args, **kwargs)
    except ValueError:
        if isinstance(called, type):
            limits = called.arg_constraints  # type: ignore[attr-defined]
            names = called.__init__.__code__.co_varnames[1:]  # type: ignore[misc]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            moved = {name: _moved(value, limits.get(name)) for name, value in given.items()}
            return called(**moved)
        owner = getattr(called, "__self__", None)
        if not isinstance(owner, Distribution) or not args:
            raise
        return called(_moved(args[0], owner.support), *args[1:], **kwargs)


def is_distribution(called: Any) -> bool:
    """Say whether it is a class of torch.distributions, or a method of such an object."""
    if isinstance(called, type):
        return issubclass(called, Distribution) and called.__module__.startswith("torch.distributions.")
    return isinstance(getattr(called, "__self__", None), Distribution)


def _moved(value: Any, limit: Any) -> Any:
    """Move the elements that a constraint refuses inside of it, or a matrix as a whole; NaN stays, and so do vectors:
    next to the border, or without a second border to where the nearest of the accepted ones is.
    """
    while isinstance(limit, constraints.independent):
        limit = limit.base_constraint
    is_number = isinstance(value, Tensor | float | int)
    if limit is None or not is_number or isinstance(limit, constraints.dependent.__class__):
        return value
    if isinstance(limit, type(constraints.positive_definite)):
        return _inside((value + value.mT) / 2, torch.linalg.cholesky_ex)
    if limit.event_dim or limit.is_discrete:  # there is no count nearest to an impossible one
        return value
    value = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.get_default_dtype())
    if not value.is_floating_point() or bool((limit.check(value) | value.isnan()).all()):
        return value
    still, near = value.detach(), math.sqrt(torch.finfo(value.dtype).eps)
    lower, upper = (
        torch.as_tensor(getattr(limit, name, default), dtype=still.dtype, device=still.device)
        for name, default in (("lower_bound", -torch.inf), ("upper_bound", torch.inf))
    )
    accepted = still[limit.check(still) & still.isfinite()] - lower
    # Next to a border a density is as steep as can be: the smallest of the others is a scale that the program knows.
    usual = accepted.amin().clamp(min=near) if accepted.numel() else torch.full_like(lower, near)
    away = torch.where((upper - lower).isfinite(), near * (upper - lower), torch.where(usual.isfinite(), usual, near))
    inside = torch.where(limit.check(still) | still.isnan(), still, still.clamp(lower + away, upper - away))
    result: Tensor = _Moved.apply(value, inside)  # type: ignore[no-untyped-call]
    return result


class _Moved(torch.autograd.Function):
    """Puts values in the place of others, which get the gradient: by it they can learn to come back."""

    @staticmethod
    def forward(context: Any, value: Tensor, inside: Tensor) -> Tensor:
        return inside

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.where(gradient.isfinite(), gradient, 0.0), None
