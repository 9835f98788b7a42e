"""From what replays have shown to a cause and advice. Pure: the same facts, the same diagnosis on every rank."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from resilient_train.types import Cause, Culprit, Diagnosis

_CLIMB = 100.0  # times the usual: an explosion on its way
_LEAP = 1e4  # the same, at once: no task changes so much
_HUGE = 1e15  # sums and squares of it leave float32
_BEYOND = 1e18  # its square, and so a norm of it, leaves float32

# Operations that are singular somewhere: where, what to do about it, and other operations of which the same is true.
SINGULAR: dict[str, tuple[str, str, str]] = {
    "log": (
        "is infinite at 0 and NaN below",
        "clamp its input from below, or use a form that takes logits",
        "log2 log10 log1p logit xlogy digamma polygamma erfinv",
    ),
    "div": (
        "is not finite where its denominator is 0",
        "add an epsilon to the denominator, or mask those elements",
        "reciprocal fmod remainder floor_divide addcdiv cumprod prod",
    ),
    "sqrt": ("has an infinite slope at 0 and is NaN below", "add an epsilon inside, or mask those elements", ""),
    "rsqrt": ("is infinite at 0", "add an epsilon inside", ""),
    "pow": (
        "is NaN for a negative base with a fractional exponent, and has an infinite value or slope at 0 for exponents "
        "below 1",
        "clamp the base from below",
        "",
    ),
    "norm": (
        "has no slope at 0",
        "add an epsilon, or mask the rows that are zero",
        "linalg_norm linalg_vector_norm vector_norm dist cdist pairwise_distance linalg_matrix_norm "
        "triplet_margin_loss renorm frobenius_norm",
    ),
    "std": (
        "has an infinite slope where all values are equal",
        "add an epsilon to the variance and take its root",
        "std_mean var var_mean",
    ),
    "atan2": ("has no slope at the origin", "move both arguments away from 0 together", "angle hypot"),
    "acos": (
        "has an infinite slope at -1 and 1 and is NaN beyond",
        "clamp its input to just inside of -1 and 1",
        "asin acosh",
    ),
    "atanh": ("is infinite at -1 and 1", "clamp its input to just inside of -1 and 1", ""),
    "softmax": (
        "is NaN where every value of a row is -inf",
        "leave one place of each row unmasked, or mask the result",
        "log_softmax logsumexp scaled_dot_product_attention multi_head_attention_forward",
    ),
    "normalize": ("has no slope at 0", "give it a larger eps", "cosine_similarity cosine_embedding_loss weight_norm"),
    "binary_cross_entropy": (
        "is infinite, or has an infinite slope, where a probability is 0 or 1",
        "use binary_cross_entropy_with_logits",
        "",
    ),
    "mean": ("is 0 / 0 over no elements", "leave out what is empty", "nanmean median adaptive_avg_pool2d"),
    "layer_norm": (
        "has no slope where all values are equal and eps is 0",
        "give it a larger eps",
        "batch_norm instance_norm group_norm rms_norm",
    ),
    "linalg": (
        "is ill-conditioned here",
        "add a small multiple of the identity, or use a form that needs no inverse",
        "inverse pinverse svd logdet slogdet det cholesky lstsq",
    ),
    "loss": (
        "is not finite for these targets",
        "look at targets that are empty, too long, or all ignored",
        "cross_entropy nll_loss ctc_loss kl_div gaussian_nll_loss poisson_nll_loss",
    ),
    "lgamma": ("is infinite at 0 and at negative whole numbers", "clamp its input from below", ""),
}
_FAMILIES = {name: op for op, (_, _, like) in SINGULAR.items() for name in (op, *like.split())}
NOT_AT_ZERO = ("softmax", "linalg", "acos", "atanh", "mean", "loss", "layer_norm", "std")
_WITH_POLES = ("log", "div", "reciprocal", "rsqrt", "atanh", "lgamma")  # infinite at a pole, not by overflow
_LOOPS = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # one product after the other, whose values cannot be seen
_PLAIN = (
    *("exp", "exp2", "expm1", "cosh", "sinh", "square", "sum", "cumsum", "prod", "einsum", "to", "half", "float", "i0"),
    *_LOOPS,
)
_PLAIN_PARTS = ("add", "sub", "mul", "mm", "conv", "linear", "dot", "mv", "_loss", "bilinear", "embedding")


@dataclass(frozen=True, slots=True)
class Observations:
    """What the replays of one rank have shown; `together` makes them those of all ranks."""

    reproduced: bool = False  # it happened again
    everywhere: bool = False  # with other rows in the batch, too
    is_compared: bool = False  # other rows could be tried
    culprit: Culprit | None = None
    kind: str = ""  # of what it made: nan, inf
    is_total: bool = False  # in a single number
    after: Culprit | None = None  # a patched line that broke before it, and whose values it fails on
    rows: tuple[int, ...] = ()  # of which each breaks a healthy batch
    odd: Mapping[int, str] = field(default_factory=dict)  # what is odd about them
    batch_is_bad: bool = False  # it holds values that are not finite
    layer: tuple[str, float] | None = None  # whose gradient is farthest above its usual, and how many times
    size: float = 0.0  # of its gradient, measured in doubles
    could_not: str = ""  # why a replay could not be made, or see


def together(facts: Sequence[Observations]) -> Observations:
    """The facts of all ranks: the first rank that has found an operation names it, and all rows count."""
    again = [one for one in facts if one.reproduced]
    could_not = next((one.could_not for one in facts if one.could_not), "")
    if not again:
        return Observations(could_not=could_not)
    return replace(
        next((one for one in again if one.culprit), again[0]),
        everywhere=any(one.everywhere for one in again),
        is_compared=any(one.is_compared for one in again),
        rows=tuple(sorted({row for one in again for row in one.rows})),
        odd={row: why for one in again for row, why in one.odd.items()},
        batch_is_bad=any(one.batch_is_bad for one in again),
        size=max(one.size for one in again),
        layer=max((one.layer for one in again if one.layer), key=lambda one: one[1], default=None),
        could_not=could_not,
    )


def climbed(history: Sequence[float]) -> float:
    """How many times the newest finite one of some losses or norms is what was usual before."""
    history = [one for one in history if math.isfinite(one)]
    if len(history) < 2:
        return 1.0
    before = sorted(abs(one) for one in history[: -max(1, len(history) // 4)])
    usual = before[len(before) // 2]
    return abs(history[-1]) / usual if usual > 0 else 1.0


TRANSIENT = Diagnosis(
    Cause.TRANSIENT,
    "The same batch at the same weights is healthy when it is tried again: if it returns, suspect the hardware, or "
    "code outside of the model.",
)
_LED_THERE = "Every batch breaks at the weights that the last updates have made: lower the learning rate."
_CLIMBED = "Gradients or losses climbed to {times:.3g} times their usual before it broke: lower the learning rate."


def on_nonfinite(facts: Observations, climb: float, *, is_first: bool = False) -> Diagnosis:
    """A loss or gradient that is not finite, and came again; `is_first`: no update has landed yet."""
    culprit = facts.culprit
    odd = {row: facts.odd[row] for row in facts.rows if row in facts.odd}
    if odd and (facts.batch_is_bad or len(odd) == len(facts.rows)):
        return on_bad_rows(odd)
    if facts.batch_is_bad and not facts.everywhere:
        why = "its rows are finite when they are fetched again" if not facts.could_not else facts.could_not
        return Diagnosis(Cause.DATA, f"The batch holds values that are not finite: {why}.")
    climbs = climb >= _CLIMB and (facts.everywhere or not facts.is_compared)
    if culprit is None:
        if climbs:
            return Diagnosis(Cause.EXPLOSION, _CLIMBED.format(times=climb))
        if facts.rows and not facts.everywhere and _BEYOND < facts.size < math.inf:
            return _on_large_gradient(facts)
        if facts.rows:
            return _on_ordinary_rows(facts)
        unseen = facts.could_not or "no operation of the forward or backward was seen to make it"
        return Diagnosis(Cause.UNKNOWN, f"It comes again with this batch, but {unseen}.")
    where, first = place(culprit), facts.after or culprit
    if _overflows(culprit, facts.kind):
        if climbs:
            return Diagnosis(Cause.EXPLOSION, f"{_CLIMBED.format(times=climb)} It broke first in {where}.", first)
        has_grown = _largest(culprit.inputs) > _HUGE or culprit.op in _LOOPS
        if facts.everywhere and not is_first and has_grown:
            return Diagnosis(Cause.EXPLOSION, f"{_LED_THERE} It broke first in {where}.", first)
        found = Diagnosis(Cause.OVERFLOW, _on_overflow(culprit), culprit, patchable=not facts.is_total)
    else:
        found = Diagnosis(Cause.OPERATION, on_operation(culprit), culprit, patchable=True)
    if facts.after is not None:
        found = replace(found, advice=_on_symptom(culprit, first), culprit=first, symptom=culprit)
    if facts.rows:
        gets = "gets" if len(facts.rows) == 1 else "get"
        found = replace(found, advice=f"{found.advice} {_rows(facts.rows)} of the data {gets} there.")
    return found


def again(known: Diagnosis) -> Diagnosis:
    """The same line once more: with other rows, so those of the first time are not mentioned."""
    culprit = known.culprit
    if culprit is None or known.cause not in (Cause.OPERATION, Cause.OVERFLOW):
        return known
    if known.symptom is not None:
        return replace(known, advice=_on_symptom(known.symptom, culprit))
    return replace(known, advice=(_on_overflow if known.cause is Cause.OVERFLOW else on_operation)(culprit))


def on_spike(facts: Observations, climb: float, jump: float = 1.0) -> Diagnosis:
    """A loss or gradient norm `jump` times the usual, which had climbed to `climb` times it before."""
    layer = ""
    if facts.layer is not None:
        layer = f" The gradient of `{facts.layer[0]}` is farthest above its usual, {facts.layer[1]:.3g} times."
    if facts.rows and not facts.everywhere:
        odd = {row: facts.odd[row] for row in facts.rows if row in facts.odd}
        return on_bad_rows(odd) if odd else _on_ordinary_rows(facts, layer)
    if (facts.everywhere and (climb >= _CLIMB or jump >= _LEAP)) or (not facts.is_compared and climb >= _CLIMB):
        times = max(climb, jump) if facts.everywhere else climb
        return Diagnosis(Cause.EXPLOSION, _CLIMBED.format(times=times) + layer)
    if facts.everywhere:
        why = (
            "Other batches do the same at these weights: if what is trained on was changed, declare it with "
            "checks.expect; else lower the learning rate."
        )
    elif not facts.is_compared:
        why = "It comes again with this batch; no other rows could be tried."
    else:
        why = "Only this batch does it, and no row of it alone: if many follow, lower the learning rate."
    return Diagnosis(Cause.UNKNOWN, why + layer)


def on_bad_rows(odd: Mapping[int, str]) -> Diagnosis:
    """Where rows are to blame, no line is: it did what it could with them."""
    rows = tuple(sorted(odd))

    def said(blamed: tuple[int, ...]) -> str:
        return f"{_rows(blamed)} of the data: {odd[blamed[0]]}; fix or remove {_it(blamed)}."

    return Diagnosis(Cause.DATA, said(rows), rows=rows, reasons={row: said((row,)) for row in rows})


def on_misled(rows: tuple[int, ...], usual: float, loss: float) -> Diagnosis:
    """The samples of updates that landed have a high loss at weights at which others have their usual one."""
    where = f"{_rows(rows)} of the data" if rows else "The samples of these updates"
    have = "has" if len(rows) == 1 else "have"
    found = f"{where} {have} a loss of up to {loss:.4g} at weights at which earlier samples have {usual:.4g}"
    return Diagnosis(Cause.DATA, f"{found}: look for wrong labels or targets there.", None, rows)


def on_changed(was: float, now: float) -> Diagnosis:
    """At weights that are verified the loss is high at once: no update can have done that, and no rate."""
    return Diagnosis(
        Cause.UNKNOWN,
        f"At weights at which the loss was {was:.4g} it is {now:.4g}: look for wrong labels, or for what changed in "
        "the data or the objective; a change on purpose is declared with checks.expect.",
    )


def _on_ordinary_rows(facts: Observations, layer: str = "") -> Diagnosis:
    """Nothing is odd about the rows: perhaps the weights cannot take them, so none is quarantined."""
    rows = _rows(facts.rows).lower()
    return Diagnosis(
        Cause.UNKNOWN, f"Look at {rows} of the data: the batch is ordinary without {_it(facts.rows)}.{layer}"
    )


def _on_large_gradient(facts: Observations) -> Diagnosis:
    """All that was computed is finite, and too large to be measured: no line is to blame, and only these rows do it."""
    rows = facts.rows
    found = f"{_rows(rows)} of the data {'takes' if len(rows) == 1 else 'take'} the gradient to {facts.size:.3g}"
    fix = f"clamp or scale what is computed of {_it(rows)}, or remove {_it(rows)}"
    return Diagnosis(Cause.OVERFLOW, f"{found}, which no update can use: {fix}.", None, rows)


def place(culprit: Culprit) -> str:
    """An operation and its line, for a person."""
    at = f" at {os.path.basename(culprit.file)}:{culprit.line}" if culprit.file else ""
    return f"`{culprit.op}`{at}"


def on_operation(culprit: Culprit) -> str:
    """What is wrong with a singular operation, and what to do about it."""
    where, inputs, name = place(culprit), culprit.inputs, _family(culprit.op)
    if name is None:
        return f"{where} makes values that are not finite of {_reached(inputs) or 'what it is given'}: mask them."
    wrong, fix, _ = SINGULAR[name]
    # Of a quotient the denominator counts; and zeros say nothing about what is singular elsewhere.
    counted = inputs[1:2] if name == "div" and len(inputs) > 1 else inputs
    reached = "" if name in NOT_AT_ZERO else _reached(counted)
    return f"{where} {wrong}{f', reached by {reached}' if reached else ''}: {fix}."


def _on_overflow(culprit: Culprit) -> str:
    """What to do about a result beyond the range of its type."""
    inputs = culprit.inputs
    of = f" of values up to {_largest(inputs):.3g}" if any("max" in one for one in inputs) else ""
    kind = next((one["dtype"] for one in inputs), "its type")
    fix = "scale or clamp its input, or compute it in a wider type"
    return f"{place(culprit)} makes more{of} than {kind} can hold: {fix}."


def _on_symptom(culprit: Culprit, first: Culprit) -> str:
    """What fails on values that armor has made up is no fault of its own line."""
    return f"{place(culprit)} fails on values from {place(first)}, which is already patched; fix that line first."


def is_plain(op: str) -> bool:
    """Say whether an operation has a value and a slope everywhere, and can only overflow."""
    return op in _PLAIN or any(part in op for part in _PLAIN_PARTS)


def _overflows(culprit: Culprit, kind: str) -> bool:
    """Whether an operation went beyond its type's range rather than meeting a point where it has no value."""
    largest = _largest(culprit.inputs)
    if _family(culprit.op) is None:
        return largest > _HUGE or (is_plain(culprit.op) and (kind == "inf" or culprit.op in _LOOPS))
    if culprit.op == "pow":
        return kind == "inf" and largest > 1
    return largest > _HUGE and culprit.op not in _WITH_POLES


def _family(op: str) -> str | None:
    """The singular operation that an operation is like; None for plain arithmetic, which can only overflow."""
    return _FAMILIES.get(op, "linalg" if op.startswith("linalg_") else None)


def _largest(inputs: Sequence[Mapping[str, Any]]) -> float:
    return max((max(abs(one["min"]), abs(one["max"])) for one in inputs if "max" in one), default=0.0)


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


def _rows(rows: Sequence[int]) -> str:
    shown = ", ".join(str(row) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
    return f"Row{'s' if len(rows) > 1 else ''} {shown}"


def _it(rows: Sequence[int]) -> str:
    return "it" if len(rows) == 1 else "them"
