"""Operations that have no value or slope somewhere, and those that can only overflow: which it was, and what helps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resilient_train.sentences import SINGULAR
from resilient_train.types import Culprit, Facts, fact

HUGE = 1e15  # sums and squares of it leave float32
_TINY = 1e-12
_LARGEST_EXPONENT = 88.0  # of e, in float32

# Operations that are singular where others are, by the name of `sentences.SINGULAR`.
_ALIKE = {
    "log": "log2 log10 log1p logit xlogy digamma polygamma erfinv",
    "div": "reciprocal fmod remainder floor_divide addcdiv cumprod prod",
    "norm": "linalg_norm linalg_vector_norm vector_norm dist cdist pairwise_distance linalg_matrix_norm "
    "triplet_margin_loss renorm frobenius_norm",
    "std": "std_mean var var_mean",
    "atan2": "angle hypot",
    "acos": "asin acosh",
    "softmax": "log_softmax logsumexp scaled_dot_product_attention multi_head_attention_forward",
    "normalize": "cosine_similarity cosine_embedding_loss weight_norm",
    "mean": "nanmean median adaptive_avg_pool2d",
    "layer_norm": "batch_norm instance_norm group_norm rms_norm",
    "linalg": "inverse pinverse svd logdet slogdet det cholesky lstsq",
    "loss": "cross_entropy nll_loss ctc_loss kl_div gaussian_nll_loss poisson_nll_loss",
}
_FAMILIES = {name: op for op in SINGULAR for name in (op, *_ALIKE.get(op, "").split())}
NOT_AT_ZERO = ("softmax", "linalg", "acos", "atanh", "mean", "loss", "layer_norm", "std")
WITH_POLES = ("log", "log2", "log10", "log1p", "div", "reciprocal", "rsqrt", "atanh", "lgamma")  # infinite there
_ONE_SIDED = ("exp", "exp2", "expm1")
_EXPONENTIAL = (*_ONE_SIDED, "cosh", "sinh", "i0", "special_i0", "special_i1")
PRODUCTS = ("prod", "cumprod", "det", "linalg_det")  # of many numbers; infinite by overflow alone
LOOPS = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # one product after the other, whose values cannot be seen


def is_plain(op: str) -> bool:
    """Say whether an operation has a value and a slope everywhere, and can only overflow."""
    return op in _EXPONENTIAL or _family(op) is None


def _family(op: str) -> str | None:
    """The entry of SINGULAR that is about an operation; None for plain arithmetic, which can only overflow."""
    return _FAMILIES.get(op, "linalg" if op.startswith("linalg_") else None)


def overflows(culprit: Culprit, kind: str) -> bool:
    """Whether an operation exceeded the range of its type, rather than met a point where it has no value."""
    op, first, size = culprit.op, culprit.inputs[:1], largest(culprit.inputs)
    if op in _EXPONENTIAL:
        return True
    if op == "poisson_nll_loss":
        return any(one.get("max", 0.0) > _LARGEST_EXPONENT for one in first)
    if _family(op) is None:  # plain arithmetic, or a function of the user's own
        return size > HUGE or kind == "inf" or op in LOOPS
    if op in PRODUCTS and kind == "inf":
        return True
    if op == "pow":
        is_at_zero = any(one.get("zeros") or one.get("smallest", 1.0) < _TINY for one in first)
        return kind == "inf" and (size > HUGE or (size > 1 and not is_at_zero))
    return size > HUGE and op not in WITH_POLES


def largest(inputs: Sequence[Mapping[str, Any]]) -> float:
    return max((max(abs(one["min"]), abs(one["max"])) for one in inputs if "max" in one), default=0.0)


def on_overflow(culprit: Culprit) -> Facts:
    inputs = culprit.inputs
    size = max((one.get("max", 0.0) for one in inputs), default=0.0) if culprit.op in _ONE_SIDED else largest(inputs)
    return fact("overflows", where=culprit.place, largest=size, dtype=inputs[0]["dtype"] if inputs else "")


def on_operation(culprit: Culprit) -> Facts:
    inputs, name = culprit.inputs, _family(culprit.op)
    if name is None:
        return fact("makes_nonfinite", where=culprit.place, **(_reached(inputs) or {"plain": True}))
    # Of a quotient the denominator counts; and zeros say nothing about what is singular elsewhere.
    counted = inputs[1:2] if name == "div" and len(inputs) > 1 else inputs
    reached = {} if name in NOT_AT_ZERO else _reached(counted)
    return fact("singular", where=culprit.place, family=name, **reached)


def _reached(inputs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    if zeros := sum(one.get("zeros", 0) for one in inputs):
        return {"zeros": zeros}
    smallest = min((one.get("smallest", 1.0) for one in inputs), default=1.0)
    if smallest < _TINY:
        return {"smallest": smallest}
    lowest = min((one.get("min", 0.0) for one in inputs), default=0.0)
    return {"lowest": lowest} if lowest < 0 else {}
