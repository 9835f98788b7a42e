"""Operations that are torch's to the last bit where torch has a finite value and slope, and finite everywhere else."""

from resilient_train.numerics.elementwise import (
    acos,
    asin,
    atan2,
    atanh,
    div,
    exp,
    log,
    log1p,
    log2,
    log10,
    pow,
    reciprocal,
    rsqrt,
    sqrt,
)
from resilient_train.numerics.limits import eps, raise_eps
from resilient_train.numerics.losses import binary_cross_entropy, cross_entropy_of_probabilities
from resilient_train.numerics.reductions import cosine_similarity, log_softmax, norm, normalize, softmax, std
from resilient_train.numerics.table import substitute

__all__ = [
    "acos",
    "asin",
    "atan2",
    "atanh",
    "binary_cross_entropy",
    "cosine_similarity",
    "cross_entropy_of_probabilities",
    "div",
    "eps",
    "exp",
    "log",
    "log1p",
    "log2",
    "log10",
    "log_softmax",
    "norm",
    "normalize",
    "pow",
    "raise_eps",
    "reciprocal",
    "rsqrt",
    "softmax",
    "sqrt",
    "std",
    "substitute",
]
