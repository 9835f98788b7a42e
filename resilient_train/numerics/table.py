"""Which safe operation takes the arguments of which of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from resilient_train.numerics import elementwise as each
from resilient_train.numerics import losses
from resilient_train.numerics import reductions as along
from resilient_train.numerics.limits import instead_of

Operation = Callable[..., Tensor]


def substitute(op_name: str) -> Operation | None:
    """Return what to call instead of torch's function, method or operator of that name, with the same arguments.

    Those that write into their input (`div_`, `__itruediv__`) have none.
    """
    return _SAFE.get(op_name)


def _divided_by(self: Tensor, other: Any) -> Tensor:
    result: Tensor = each.reciprocal(self) * other  # as torch has it: a quotient would round otherwise
    return result


def _power_of(self: Tensor, other: Any) -> Tensor:
    return each.pow(other, self)


def _vector_norm(x: Tensor, ord: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
    return along.norm(x, ord, *args, **kwargs)


@instead_of(torch.linalg.norm)
def _linalg_norm(
    A: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    of_vectors = ord in (None, "fro") or isinstance(dim, int) or (dim is None and A.ndim == 1)
    if of_vectors or (dim is not None and len(dim) == 1):
        return along.norm(A, ord, dim, keepdim, dtype)
    values: Tensor = torch.linalg.norm(A, ord, dim, keepdim, dtype=dtype)  # singular ones, which are torch's own
    return values


def _std(
    input: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> Tensor:
    """Both of torch's forms: the older one has `unbiased`, alone or behind `dim`."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    return along.std(input, dim, correction=int(unbiased) if correction is None else correction, keepdim=keepdim)


def _with_dim(safe: Operation) -> Operation:
    """`torch.softmax(input, dim, dtype)` and `F.softmax(input, dim, _stacklevel, dtype)` share a name."""

    def operation(input: Tensor, dim: int | None = None, *rest: Any, dtype: Any = None, **_: Any) -> Tensor:
        if dim is None:  # what torch takes, with a warning
            dim = 0 if input.ndim in (0, 1, 3) else 1
        return safe(input, dim, next((given for given in rest if isinstance(given, torch.dtype)), dtype))

    return operation


def _binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    if size_average is not None or reduce is not None:  # the older way to say it
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    return losses.binary_cross_entropy(input, target, weight, reduction)


_SAFE: dict[str, Operation] = {
    "log": each.log,
    "log2": each.log2,
    "log10": each.log10,
    **dict.fromkeys(("log1p", "special_log1p"), each.log1p),
    "exp": each.exp,
    "sqrt": each.sqrt,
    "rsqrt": each.rsqrt,
    "reciprocal": each.reciprocal,
    **dict.fromkeys(("div", "divide", "true_divide", "__div__", "__truediv__"), each.div),
    **dict.fromkeys(("__rdiv__", "__rtruediv__"), _divided_by),
    **dict.fromkeys(("pow", "__pow__"), each.pow),
    "__rpow__": _power_of,
    **dict.fromkeys(("acos", "arccos"), each.acos),
    **dict.fromkeys(("asin", "arcsin"), each.asin),
    **dict.fromkeys(("atanh", "arctanh"), each.atanh),
    **dict.fromkeys(("atan2", "arctan2"), each.atan2),
    "norm": along.norm,
    **dict.fromkeys(("vector_norm", "linalg_vector_norm"), _vector_norm),
    "linalg_norm": _linalg_norm,
    "std": _std,
    **dict.fromkeys(("softmax", "special_softmax"), _with_dim(along.softmax)),
    **dict.fromkeys(("log_softmax", "special_log_softmax"), _with_dim(along.log_softmax)),
    "cosine_similarity": along.cosine_similarity,
    "normalize": along.normalize,
    "binary_cross_entropy": _binary_cross_entropy,
}
