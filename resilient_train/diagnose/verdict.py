"""From what replays have shown to a cause and advice. Pure: every rank comes to the same diagnosis."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from resilient_train.numerics.domains import HAVE_VALUES, OUT_OF_RANGE
from resilient_train.numerics.operations import family
from resilient_train.types import Cause, Culprit, Diagnosis

_CLIMB = 100.0  # times the usual: an explosion on its way
_LEAP = 1e4  # the same, at once: no task changes so much
_START = 32  # updates in which weights are led astray from where they began: a line that breaks then is innocent
_FIRST = 4  # updates in which a rate that is far too high does so, whatever the losses say
_MOST_ROWS = 8  # that are named
_HUGE = 1e15  # sums and squares of it leave float32
_TINY = 1e-12
_BEYOND = 1e18  # its square, and so a norm of it, leaves float32

_BEFORE = "mask those elements before it (after it their gradient stays NaN)"
_EPSILON = f"{_BEFORE}, or add an epsilon inside that is not tiny next to usual values (else values or slopes are huge)"
# Operations that are singular somewhere: where, and what to do about it.
SINGULAR = {
    "log": ("is infinite at 0 and NaN below", f"{_BEFORE}, clamp its input from below, or work with logits"),
    "div": (
        "is not finite where its denominator is 0",
        f"{_BEFORE}, or keep the denominator above a size that is usual for it (a tiny epsilon makes huge quotients)",
    ),
    "sqrt": ("has an infinite slope at 0 and is NaN below", _EPSILON),
    "rsqrt": ("is infinite at 0", _EPSILON),
    "pow": (
        "is NaN for a negative base with a fractional exponent, and infinite, or steep, at 0 for exponents below 1",
        f"{_BEFORE}, or clamp the base from below",
    ),
    "norm": ("has no slope at 0", "add an epsilon inside, or mask rows of zeros before it (their slope is NaN later)"),
    "std": ("has an infinite slope where all values are equal", "add an epsilon to the variance and take its root"),
    "atan2": ("has no slope at the origin", "move both arguments away from 0 together"),
    "acos": ("has an infinite slope at -1 and 1 and is NaN beyond", "clamp its input to just inside of -1 and 1"),
    "atanh": ("is infinite at -1 and 1", "clamp its input to just inside of -1 and 1"),
    "softmax": ("is NaN where all of a row is -inf", "leave one place of each row unmasked, or mask the result"),
    "normalize": ("has no slope at 0", "give it a larger eps"),
    "binary_cross_entropy": ("is infinite, or steep, at chances of 0 and 1", "use binary_cross_entropy_with_logits"),
    "mean": ("is 0 / 0 over no elements", "leave out what is empty"),
    "layer_norm": ("has no slope where all values are equal and eps is 0", "give it a larger eps"),
    "linalg": ("is ill-conditioned here", "add a small multiple of the identity, or use a form that needs no inverse"),
    "loss": ("is not finite for these targets", "look at targets that are empty, too long, or all ignored"),
    "lgamma": ("is infinite at 0 and at negative whole numbers", "clamp its input from below"),
}
_SINGULAR_ALIKE = {
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
_FAMILIES = {name: op for op in SINGULAR for name in (op, *_SINGULAR_ALIKE.get(op, "").split())}
NOT_AT_ZERO = ("softmax", "linalg", "acos", "atanh", "mean", "loss", "layer_norm", "std")
_WITH_POLES = ("log", "log2", "log10", "log1p", "div", "reciprocal", "rsqrt", "atanh", "lgamma")  # infinite there
_EVEN = ("cosh", "sinh", "i0", "special_i0", "special_i1")  # large on both sides
_EXPONENTIAL = ("exp", "exp2", "expm1", *_EVEN)
_PRODUCTS = ("prod", "cumprod", "det", "linalg_det")  # infinite by overflow alone
_LARGEST_EXPONENT = 88.0  # of e, in float32
_LOOPS = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # one product after the other, whose values cannot be seen


@dataclass(frozen=True, slots=True)
class Observations:
    """What the replays of one rank have shown; `together` combines those of all ranks."""

    reproduced: bool = False  # the replay broke too
    everywhere: bool = False  # it broke with other rows in the batch, too
    is_compared: bool = False  # other rows could be tried
    culprit: Culprit | None = None  # the operation that broke
    kind: str = ""  # of what it made: nan, inf
    is_scalar: bool = False  # its result is a single number
    was_given: bool = False  # it did not make that: the program gave it to it
    after: Culprit | None = None  # the first patched operation whose values were repaired before it broke
    is_tried: bool = False  # that operation is patched and broke again, or cannot be patched
    rows: tuple[int, ...] = ()  # each of them breaks a healthy batch
    odd: Mapping[int, str] = field(default_factory=dict)  # by row of `rows`: which of its values are unusual
    others: int = 0  # rows that were tried where an operation of data alone breaks on `rows`, and hardly on any other
    have_passed: bool = False  # the rows were trained on before, in an earlier epoch
    are_again: bool = False  # each of the rows made the loss or the gradient jump in earlier updates
    batch_is_bad: bool = False  # it holds values that are not finite
    size: float = 0.0  # of the gradient, measured in doubles
    failure: str = ""  # why a replay was impossible

    @property
    def blames_rows(self) -> bool:
        return bool(self.odd) and (self.batch_is_bad or len(self.odd) == len(self.rows))


def together(observed: Sequence[Observations]) -> Observations:
    """Combine what all ranks observed: the first one that found an operation names it, and rows of all count."""
    again = [one for one in observed if one.reproduced]
    failure = next((one.failure for one in observed if one.failure), "")
    places = {(one.culprit.file, one.culprit.line, one.culprit.op) for one in again if one.culprit}
    if not again:
        return Observations(failure=failure)
    return replace(
        next((one for one in again if one.culprit), again[0]),
        everywhere=any(one.everywhere for one in again),
        is_compared=any(one.is_compared for one in again),
        rows=tuple(sorted({row for one in again for row in one.rows})),
        odd={row: why for one in again for row, why in one.odd.items()},
        others=min((one.others for one in again if one.rows or one.culprit), default=0) if len(places) == 1 else 0,
        have_passed=all(one.have_passed for one in again if one.rows),
        are_again=all(one.are_again for one in again if one.rows),
        batch_is_bad=any(one.batch_is_bad for one in again),
        size=max(one.size for one in again),
        failure=failure,
    )


def climbed(history: Sequence[float]) -> float:
    """How many times the newest finite loss or norm of a history is what was usual before."""
    history = [one for one in history if math.isfinite(one)]
    if len(history) < 2:
        return 1.0
    before = sorted(abs(one) for one in history[: -max(1, len(history) // 4)])
    usual = before[len(before) // 2]
    return abs(history[-1]) / usual if usual > 0 else 1.0


TRANSIENT = Diagnosis(
    Cause.TRANSIENT,
    "Tried again this batch is healthy: if it returns, suspect the hardware, or code outside of the model.",
)
_CLIMBED = "Gradients or losses climbed to {times:.3g} times their usual before it broke: lower the learning rate."


def on_nonfinite(facts: Observations, climb: float, leap: float = 1.0, *, landed: int = _FIRST) -> Diagnosis:
    """Losses or norms have climbed to `climb` times their usual, losses to `leap` times; `landed` is the last step."""
    culprit, rows = facts.culprit, facts.rows
    if facts.blames_rows:
        return on_bad_rows(facts.odd)
    if facts.batch_is_bad and not facts.everywhere:
        why = facts.failure or "none of its rows was seen to hold them when fetched again"
        return Diagnosis(Cause.DATA, f"The batch holds values that are not finite: {why}.")
    climbs = climb >= _CLIMB and (facts.everywhere or not facts.is_compared)
    if culprit is None:
        if climbs:
            return Diagnosis(Cause.EXPLOSION, _CLIMBED.format(times=climb))
        if rows and not facts.everywhere and _BEYOND < facts.size < math.inf:  # all of it is finite: no line to blame
            found = f"With {_rows(rows)} the gradient is {facts.size:.3g}, which no update can use"
            fix = f"clamp or scale what is computed of {_it(rows)}, or remove {_it(rows)}"
            return Diagnosis(Cause.OVERFLOW, f"{found}: {fix}.", None, rows)
        if rows and climb >= _CLIMB:
            return _on_ordinary_rows(rows)
        if rows:  # they are guilty by what follows from them, whatever it is that they do
            found = f"Any batch with {_rows(rows)} is like that; why is open, as no operation was seen to make it"
            return Diagnosis(Cause.UNKNOWN, f"{found}: look at {_it(rows)}, or remove {_it(rows)}.", None, rows)
        unseen = facts.failure or "no operation of the forward or backward was seen to make it"
        return Diagnosis(Cause.UNKNOWN, f"It comes again with this batch, but {unseen}.")
    if facts.was_given:
        return Diagnosis(Cause.OPERATION, f"{_on_given(culprit)}{_seen_with(rows)}", culprit, rows)
    if facts.others and not facts.everywhere and not _overflows(culprit, facts.kind):
        return _on_rare_rows(facts, culprit)
    first, is_overflow = facts.after or culprit, _overflows(culprit, facts.kind)
    if culprit.op == "ctc_loss" and rows and not (facts.everywhere or is_overflow or facts.after):
        return on_bad_rows(dict.fromkeys(rows, f"no finite loss in {_place(culprit)} for such targets"))
    most, until = (_HUGE, _FIRST) if culprit.op in _WITH_POLES else (_LEAP, _START)  # losses are large near a pole
    is_led = facts.everywhere and leap >= most and landed < until
    if is_overflow or is_led:  # of what the weights have become: the line is where it shows, and innocent
        where = f"It broke first in {_place(culprit)}."
        if climbs or is_led:
            return Diagnosis(Cause.EXPLOSION, f"{_CLIMBED.format(times=max(climb, leap))} {where}")
        is_early = landed < _FIRST and all(one.get("dtype") != "float16" for one in culprit.inputs)
        is_thrown = is_early or _largest(culprit.inputs) > _HUGE or culprit.op in _LOOPS
        if facts.everywhere and landed and is_thrown:
            why = "Every batch breaks at the weights that the last updates have made: lower the learning rate."
            return Diagnosis(Cause.EXPLOSION, f"{why} {where}")
    if facts.after is not None:  # what fails on the values of a patch is not the fault of its own line
        why = "which is already patched; fix that line first."
        advice = f"{_place(culprit)} fails on values from {_place(facts.after)}, {why}"
    else:
        advice = _on_overflow(culprit) if is_overflow else on_operation(culprit)
    return Diagnosis(
        Cause.OVERFLOW if is_overflow else Cause.OPERATION,
        f"{advice}{_seen_with(rows)}",
        first,
        rows if facts.is_tried and not facts.everywhere else (),  # what is left to do about it
        patchable=not (is_overflow and facts.is_scalar) or culprit.op in _PRODUCTS,  # of many numbers
        symptom=culprit if facts.after else None,
    )


def on_error(facts: Observations, error: str, *, landed: int = 0) -> Diagnosis:
    """Diagnose an exception of user code, in most cases one that other batches at the same weights do not raise."""
    if facts.blames_rows:
        return on_bad_rows(facts.odd)
    if (culprit := facts.culprit) is not None:
        if facts.others and not facts.everywhere and facts.kind == "error":
            return _on_rare_rows(facts, culprit, error)
        found, has_value = _place(culprit), facts.kind == "domain" or family(culprit.op) in HAVE_VALUES
        is_thrown = 0 < landed < _FIRST and facts.everywhere and (has_value or facts.kind in ("nan", "inf"))
        if is_thrown and (thrown := on_nonfinite(facts, 1.0, landed=landed)).cause is Cause.EXPLOSION:
            return thrown
        if facts.kind in ("nan", "inf"):
            advice = f"{on_operation(culprit)} What follows from it raised {error}"
            symptom = culprit if facts.after else None
            return Diagnosis(Cause.OPERATION, advice, facts.after or culprit, patchable=True, symptom=symptom)
        if has_value or OUT_OF_RANGE in error:
            advice = f"{found} raised {error}: keep what it is given within its domain, or catch it there."
            return Diagnosis(Cause.OPERATION, advice, culprit, patchable=True)
    if facts.rows and not facts.everywhere:
        if facts.have_passed and culprit is not None:
            since = f"{_rows(facts.rows)}, which passed it in an earlier epoch"
            advice = f"{_place(culprit)} raised {error} with {since}: keep what it is given in its domain, or catch it."
            return Diagnosis(Cause.OPERATION, advice, culprit, facts.rows)
        advice = f"With {_rows(facts.rows)} an update raised {error}: fix or remove such rows, or fix the line."
        return Diagnosis(Cause.DATA, advice, rows=facts.rows)
    some = "Only some batches raise" if facts.is_compared else "The batch raises"
    which = "Every batch raises" if facts.everywhere else some
    return Diagnosis(Cause.UNKNOWN, f"{which} {error}: handle that in your code.", culprit)


def _on_rare_rows(facts: Observations, culprit: Culprit, error: str = "") -> Diagnosis:
    """Blame rows for what they give an operation of data alone: a value in its place would be made up, like data."""
    does, line = (f"raises {error}, and for", "") if error else ("breaks on such values, and on", on_operation(culprit))
    why = f"{_place(culprit)} {does} hardly any of {facts.others} others"
    found = on_bad_rows(dict.fromkeys(facts.rows, why))
    has_value = facts.kind != "error" or family(culprit.op) in HAVE_VALUES  # for more rows than the budget allows
    advice = f"{found.advice} Or fix the line{f': {line}' if line else '.'}"
    return replace(found, advice=advice, culprit=culprit, patchable=has_value)


def on_spike(facts: Observations, climb: float, jump: float = 1.0) -> Diagnosis:
    """Diagnose a loss or gradient norm `jump` times the usual, which had climbed to `climb` times it before."""
    if facts.rows and not facts.everywhere:
        if facts.odd:
            return on_bad_rows(facts.odd)
        is_theirs = facts.are_again and climb < _CLIMB
        return _on_rows_again(facts.rows) if is_theirs else _on_ordinary_rows(facts.rows)
    if (facts.everywhere and (climb >= _CLIMB or jump >= _LEAP)) or (not facts.is_compared and climb >= _CLIMB):
        times = max(climb, jump) if facts.everywhere else climb
        return Diagnosis(Cause.EXPLOSION, _CLIMBED.format(times=times))
    why = "Only this batch does it, and no row of it alone: if many follow, lower the learning rate."
    if facts.everywhere:
        why = "Other batches do the same: if the task was changed, declare it with expect=[STEP]; else lower the rate."
    elif not facts.is_compared:
        why = "It comes again with this batch; no other rows could be tried."
    return Diagnosis(Cause.UNKNOWN, why)


def on_bad_rows(*odd: Mapping[int, str]) -> Diagnosis:
    """Blame rows, given what is wrong with each, as each rank found it. No line of code is to blame for them."""
    reasons = {row: why for some in odd for row, why in some.items()}
    rows = tuple(sorted(reasons))

    def advice(blamed: tuple[int, ...]) -> str:
        return f"{_rows(blamed).capitalize()}: {reasons[blamed[0]]}; fix or remove {_it(blamed)}."

    return Diagnosis(Cause.DATA, advice(rows), rows=rows, reasons={row: advice((row,)) for row in rows})


def on_misled(usual: float, loss: float) -> Diagnosis:
    """The samples of updates that landed have a high loss at weights at which others have their usual one."""
    found = f"The loss of these updates' samples is {loss:.4g} at weights at which that of earlier ones is {usual:.4g}"
    return Diagnosis(Cause.DATA, f"{found}: look for wrong labels or targets there.")


def on_changed(was: float, now: float) -> Diagnosis:
    """At verified weights the loss is high at once, which neither an update nor a learning rate can have done."""
    return Diagnosis(
        Cause.UNKNOWN,
        f"At weights at which the loss was {was:.4g} it is {now:.4g}: look for wrong labels, or for what changed in "
        "the data or the objective; a change on purpose is declared with expect=[STEP].",
    )


def _on_rows_again(rows: tuple[int, ...]) -> Diagnosis:
    """Nothing is odd about the rows but what they do, again and again: each time a whole batch is lost with them."""
    they = "It did" if len(rows) == 1 else "They did"
    why = f"{_rows(rows).capitalize()}: the batch is ordinary without {_it(rows)}. {they} the same in earlier updates."
    return Diagnosis(Cause.DATA, why, None, rows)


def _on_ordinary_rows(rows: tuple[int, ...]) -> Diagnosis:
    """Nothing is odd about the rows: the weights may be at fault, so none is quarantined."""
    advice = f"Look at {_rows(rows)}: the batch is ordinary without {_it(rows)}."
    return Diagnosis(Cause.UNKNOWN, advice, suspects=rows)


def on_operation(culprit: Culprit) -> str:
    where, inputs, name = _place(culprit), culprit.inputs, _family(culprit.op)
    if name is None:
        of = _reached(inputs) or "what it is given"
        return f"{where} makes values that are not finite of {of}: mask them before it."
    wrong, fix = SINGULAR[name]
    # Of a quotient the denominator counts; and zeros say nothing about what is singular elsewhere.
    counted = inputs[1:2] if name == "div" and len(inputs) > 1 else inputs
    reached = "" if name in NOT_AT_ZERO else _reached(counted)
    return f"{where} {wrong}{f', reached by {reached}' if reached else ''}: {fix}."


def _on_given(culprit: Culprit) -> str:
    """What to do about a value that no operation of torch's made: it is not finite from where it enters."""
    return (
        f"{_place(culprit)} is given values that are not finite by the program itself, as a constant or from code "
        "outside of torch, and they reach the loss: mask those elements before, or give them another value."
    )


def _on_overflow(culprit: Culprit) -> str:
    inputs = culprit.inputs
    is_one_sided = culprit.op in _EXPONENTIAL and culprit.op not in _EVEN
    highest = max((one["max"] for one in inputs if "max" in one), default=None)
    of = "" if highest is None else f" of values up to {highest if is_one_sided else _largest(inputs):.3g}"
    kind = next((one["dtype"] for one in inputs), "its type")
    fix = "scale or clamp its input, or compute it in a wider type"
    return f"{_place(culprit)} makes more{of} than {kind} can hold: {fix}."


def is_plain(op: str) -> bool:
    """Say whether an operation has a value and a slope everywhere, and can only overflow."""
    return op in _EXPONENTIAL or _family(op) is None


def _overflows(culprit: Culprit, kind: str) -> bool:
    """Whether an operation exceeded the range of its type, rather than met a point where it has no value."""
    largest = _largest(culprit.inputs)
    if culprit.op in _EXPONENTIAL:  # which have a value and a slope everywhere
        return True
    if culprit.op == "poisson_nll_loss":
        return any(one.get("max", 0.0) > _LARGEST_EXPONENT for one in culprit.inputs[:1])
    if _family(culprit.op) is None:  # plain arithmetic, or a function of the user's own
        return largest > _HUGE or kind == "inf" or culprit.op in _LOOPS
    if culprit.op in _PRODUCTS and kind == "inf":
        return True
    if culprit.op == "pow":
        is_at_zero = any(one.get("zeros") or one.get("smallest", 1.0) < _TINY for one in culprit.inputs[:1])
        return kind == "inf" and (largest > _HUGE or (largest > 1 and not is_at_zero))
    return largest > _HUGE and culprit.op not in _WITH_POLES


def _family(op: str) -> str | None:
    """The entry of SINGULAR that is about an operation; None for plain arithmetic, which can only overflow."""
    return _FAMILIES.get(op, "linalg" if op.startswith("linalg_") else None)


def _largest(inputs: Sequence[Mapping[str, Any]]) -> float:
    return max((max(abs(one["min"]), abs(one["max"])) for one in inputs if "max" in one), default=0.0)


def _reached(inputs: Sequence[Mapping[str, Any]]) -> str:
    if zeros := sum(one.get("zeros", 0) for one in inputs):
        return "1 element that is 0" if zeros == 1 else f"{zeros:,} elements that are 0"
    smallest = min((one["smallest"] for one in inputs if "smallest" in one), default=1.0)
    if smallest < _TINY:
        return f"values as small as {smallest:.3g}"
    lowest = min((one["min"] for one in inputs if "min" in one), default=0.0)
    return f"values down to {lowest:.3g}" if lowest < 0 else ""


def _place(culprit: Culprit) -> str:
    at = f" at {os.path.basename(culprit.file)}:{culprit.line}" if culprit.file else ""
    return f"`{culprit.op}`{at}"


def _rows(rows: Sequence[int]) -> str:
    shown = ", ".join(str(row) for row in rows[:_MOST_ROWS]) + (", ..." if len(rows) > _MOST_ROWS else "")
    return f"row{'s' if len(rows) > 1 else ''} {shown}"


def _seen_with(rows: Sequence[int]) -> str:
    return f" Seen with {_rows(rows)}." if rows else ""


def _it(rows: Sequence[int]) -> str:
    return "it" if len(rows) == 1 else "them"
