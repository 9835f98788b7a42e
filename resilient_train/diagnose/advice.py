"""What a person can do about an operation, in one sentence each. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

# What is singular about an operation, and the mend.
SINGULAR: dict[str, tuple[str, str]] = {
    "log": ("is infinite at 0 and NaN below", "clamp its input from below, or use a form that takes logits"),
    "div": ("is not finite where its denominator is 0", "add an epsilon to the denominator, or mask those elements"),
    "sqrt": ("has an infinite slope at 0 and is NaN below", "add an epsilon inside, or mask those elements"),
    "rsqrt": ("is infinite at 0", "add an epsilon inside"),
    "pow": (
        "is NaN for a negative base with a fractional exponent, and has an infinite value or slope at 0 for exponents "
        "below 1",
        "clamp the base from below",
    ),
    "norm": ("has no slope at 0", "add an epsilon, or mask the rows that are zero"),
    "std": ("has an infinite slope where all values are equal", "add an epsilon to the variance and take its root"),
    "atan2": ("has no slope at the origin", "move both arguments away from 0 together"),
    "acos": ("has an infinite slope at -1 and 1 and is NaN beyond", "clamp its input to just inside of -1 and 1"),
    "atanh": ("is infinite at -1 and 1", "clamp its input to just inside of -1 and 1"),
    "softmax": (
        "is NaN where every value of a row is -inf",
        "leave one place of each row unmasked, or mask the result",
    ),
    "normalize": ("has no slope at 0", "give it a larger eps"),
    "binary_cross_entropy": (
        "is infinite, or has an infinite slope, where a probability is 0 or 1",
        "use binary_cross_entropy_with_logits",
    ),
    "mean": ("is 0 / 0 over no elements", "leave out what is empty"),
    "layer_norm": ("has no slope where all values are equal and eps is 0", "give it a larger eps"),
    "linalg": ("is ill-conditioned here", "add a small multiple of the identity, or use a form that needs no inverse"),
    "loss": ("is not finite for these targets", "look at targets that are empty, too long, or all ignored"),
    "lgamma": ("is infinite at 0 and at negative whole numbers", "clamp its input from below"),
}
_LIKE = {
    **dict.fromkeys(("log2", "log10", "log1p", "logit", "xlogy", "digamma", "polygamma", "erfinv"), "log"),
    **dict.fromkeys(("reciprocal", "fmod", "remainder", "floor_divide", "addcdiv"), "div"),
    **dict.fromkeys(("linalg_norm", "linalg_vector_norm", "vector_norm", "dist", "cdist", "pairwise_distance"), "norm"),
    **dict.fromkeys(("linalg_matrix_norm", "triplet_margin_loss", "renorm", "frobenius_norm"), "norm"),
    **dict.fromkeys(("std_mean", "var", "var_mean"), "std"),
    **dict.fromkeys(("angle", "hypot", "arctan2"), "atan2"),
    **dict.fromkeys(("asin", "acosh"), "acos"),
    **dict.fromkeys(
        ("log_softmax", "logsumexp", "scaled_dot_product_attention", "multi_head_attention_forward"), "softmax"
    ),
    **dict.fromkeys(("cosine_similarity", "cosine_embedding_loss", "weight_norm"), "normalize"),
    **dict.fromkeys(("batch_norm", "instance_norm", "group_norm", "rms_norm"), "layer_norm"),
    **dict.fromkeys(("nanmean", "median", "adaptive_avg_pool2d"), "mean"),
    **dict.fromkeys(("inverse", "pinverse", "svd", "logdet", "slogdet", "det", "cholesky", "lstsq"), "linalg"),
    **dict.fromkeys(
        ("cross_entropy", "nll_loss", "ctc_loss", "kl_div", "gaussian_nll_loss", "poisson_nll_loss"), "loss"
    ),
    **dict.fromkeys(("cumprod", "prod"), "div"),
}


_NOT_AT_ZERO = ("softmax", "linalg", "acos", "atanh", "mean", "loss", "layer_norm", "std")
_PLAIN = (
    "exp",
    "exp2",
    "expm1",
    "cosh",
    "sinh",
    "square",
    "sum",
    "cumsum",
    "prod",
    "einsum",
    "to",
    "half",
    "float",
    "i0",
)
_LOOPS = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # a product behind the other, of which nobody sees the values
_PLAIN_PARTS = ("add", "sub", "mul", "mm", "conv", "linear", "dot", "mv", "_loss", "bilinear", "embedding")


def is_plain(op: str) -> bool:
    """Say whether an operation has a value and a slope everywhere, if only its type had room for it."""
    return op in (*_PLAIN, *_LOOPS) or any(part in op for part in _PLAIN_PARTS)


def is_loop(op: str) -> bool:
    """Say whether values may grow without bound within an operation: what it is given does not tell of them."""
    return op in _LOOPS


def family(op: str) -> str | None:
    """The singular operation that an operation is one of; None for plain arithmetic, which can only overflow."""
    if op in SINGULAR:
        return op
    return _LIKE.get(op, "linalg" if op.startswith("linalg_") else None)


def place(op: str, file: str, line: int) -> str:
    """An operation and where it stands, for a person."""
    return f"`{op}` at {os.path.basename(file)}:{line}" if file else f"`{op}`"


def on_operation(where: str, op: str, inputs: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with a singular operation, and the mend."""
    name = family(op)
    if name is None:
        return f"{where} makes values that are not finite of {_reached(inputs) or 'what it is given'}: mask them."
    wrong, mend = SINGULAR[name]
    # Of a quotient the denominator counts; and zeros say nothing about what is singular elsewhere.
    counted = inputs[1:2] if name == "div" and len(inputs) > 1 else inputs
    reached = "" if name in _NOT_AT_ZERO else _reached(counted)
    return f"{where} {wrong}{f', reached by {reached}' if reached else ''}: {mend}."


def on_overflow(where: str, inputs: Sequence[Mapping[str, Any]]) -> str:
    """What to do about a result beyond the range of its type."""
    largest = max((max(abs(one["min"]), abs(one["max"])) for one in inputs if "max" in one), default=None)
    of = f" of values up to {largest:.3g}" if largest is not None else ""
    kind = next((one["dtype"] for one in inputs), "its type")
    return f"{where} makes more{of} than {kind} can hold: scale or clamp its input, or compute it in a wider type."


def on_follower(where: str, first: str) -> str:
    """What breaks of values that armor has made up is no fault of its own line."""
    return f"{where} breaks of what came of {first}, which broke before it and wears armor: mend that one first."


def _reached(inputs: Sequence[Mapping[str, Any]]) -> str:
    """The elements that are likely to blame."""
    zeros = sum(one.get("zeros", 0) for one in inputs)
    if zeros:
        return f"{zeros:,} {'element' if zeros == 1 else 'elements'} that {'is' if zeros == 1 else 'are'} 0"
    smallest = min((one["smallest"] for one in inputs if "smallest" in one), default=None)
    if smallest is not None and smallest < 1e-12:
        return f"values as small as {smallest:.3g}"
    lowest = min((one["min"] for one in inputs if "min" in one), default=0.0)
    return f"values down to {lowest:.3g}" if lowest < 0 else ""
