"""From what replays have shown to a cause and advice. Pure: every rank comes to the same diagnosis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from resilient_train.numerics.domains import HAVE_VALUES, OUT_OF_RANGE
from resilient_train.numerics.operations import family
from resilient_train.sentences import SINGULAR
from resilient_train.types import Cause, Culprit, Diagnosis, Facts, fact

_CLIMB = 100.0  # times the usual: an explosion on its way
_LEAP = 1e4  # the same, at once: no task changes so much
_START = 32  # updates in which weights are led astray from where they began: a line that breaks then is innocent
_FIRST = 4  # updates in which a rate that is far too high does so, whatever the losses say
_HUGE = 1e15  # sums and squares of it leave float32
_TINY = 1e-12
_BEYOND = 1e18  # its square, and so a norm of it, leaves float32

# Which operations are singular where others are, by the name of `sentences.SINGULAR`.
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
    odd: Mapping[int, Facts] = field(default_factory=dict)  # by row of `rows`: which of its values are unusual
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


TRANSIENT = Diagnosis(Cause.TRANSIENT, fact("passed_on_replay"))


def on_nonfinite(facts: Observations, climb: float, leap: float = 1.0, *, landed: int = _FIRST) -> Diagnosis:
    """Losses or norms have climbed to `climb` times their usual, losses to `leap` times; `landed` is the last step."""
    culprit, rows = facts.culprit, facts.rows
    if facts.blames_rows:
        return on_bad_rows(facts.odd)
    if facts.batch_is_bad and not facts.everywhere:
        return Diagnosis(Cause.DATA, fact("batch_not_finite", why=facts.failure))
    climbs = climb >= _CLIMB and (facts.everywhere or not facts.is_compared)
    if culprit is None:
        if climbs:
            return Diagnosis(Cause.EXPLOSION, fact("climbed", times=climb))
        if rows and not facts.everywhere and _BEYOND < facts.size < math.inf:  # all of it is finite: no line to blame
            return Diagnosis(Cause.OVERFLOW, fact("gradient_too_large", rows=[*rows], size=facts.size), None, rows)
        if rows and climb >= _CLIMB:
            return _on_ordinary_rows(rows)
        if rows:  # they are guilty by what follows from them, whatever it is that they do
            return Diagnosis(Cause.UNKNOWN, fact("rows_fail", rows=[*rows]), None, rows)
        return Diagnosis(Cause.UNKNOWN, fact("reproducible", why=facts.failure))
    if facts.was_given:
        return Diagnosis(Cause.OPERATION, fact("is_given", where=culprit.place) + _seen_with(rows), culprit, rows)
    if facts.others and not facts.everywhere and not _overflows(culprit, facts.kind):
        return _on_rare_rows(facts, culprit)
    first, is_overflow = facts.after or culprit, _overflows(culprit, facts.kind)
    if culprit.op == "ctc_loss" and rows and not (facts.everywhere or is_overflow or facts.after):
        return on_bad_rows(dict.fromkeys(rows, fact("no_loss", where=culprit.place)))
    most, until = (_HUGE, _FIRST) if culprit.op in _WITH_POLES else (_LEAP, _START)  # losses are large near a pole
    is_led = facts.everywhere and leap >= most and landed < until
    if is_overflow or is_led:  # of what the weights have become: the line is where it shows, and innocent
        where = fact("broke_first", where=culprit.place)
        if climbs or is_led:
            return Diagnosis(Cause.EXPLOSION, fact("climbed", times=max(climb, leap)) + where)
        is_early = landed < _FIRST and all(one.get("dtype") != "float16" for one in culprit.inputs)
        is_thrown = is_early or _largest(culprit.inputs) > _HUGE or culprit.op in _LOOPS
        if facts.everywhere and landed and is_thrown:
            return Diagnosis(Cause.EXPLOSION, fact("every_batch_breaks") + where)
    if facts.after is not None:  # what fails on the values of a patch is not the fault of its own line
        advice = fact("follows_patch", where=culprit.place, patched=facts.after.place)
    else:
        advice = _on_overflow(culprit) if is_overflow else on_operation(culprit)
    return Diagnosis(
        Cause.OVERFLOW if is_overflow else Cause.OPERATION,
        advice + _seen_with(rows),
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
        has_value = facts.kind == "domain" or family(culprit.op) in HAVE_VALUES
        is_thrown = 0 < landed < _FIRST and facts.everywhere and (has_value or facts.kind in ("nan", "inf"))
        if is_thrown and (thrown := on_nonfinite(facts, 1.0, landed=landed)).cause is Cause.EXPLOSION:
            return thrown
        if facts.kind in ("nan", "inf"):
            advice = on_operation(culprit) + fact("then_raised", error=error)
            symptom = culprit if facts.after else None
            return Diagnosis(Cause.OPERATION, advice, facts.after or culprit, patchable=True, symptom=symptom)
        if has_value or OUT_OF_RANGE in error:
            advice = fact("raised", where=culprit.place, error=error)
            return Diagnosis(Cause.OPERATION, advice, culprit, patchable=True)
    if facts.rows and not facts.everywhere:
        if facts.have_passed and culprit is not None:
            advice = fact("raised_now", where=culprit.place, error=error, rows=[*facts.rows])
            return Diagnosis(Cause.OPERATION, advice, culprit, facts.rows)
        return Diagnosis(Cause.DATA, fact("rows_raised", rows=[*facts.rows], error=error), rows=facts.rows)
    which = "everywhere" if facts.everywhere else "some" if facts.is_compared else "alone"
    return Diagnosis(Cause.UNKNOWN, fact("batches_raise", error=error, **{which: True}), culprit)


def _on_rare_rows(facts: Observations, culprit: Culprit, error: str = "") -> Diagnosis:
    """Blame rows for what they give an operation of data alone: a value in its place would be made up, like data."""
    why = fact("row_breaks", where=culprit.place, others=facts.others)
    if error:
        why = fact("row_raises", where=culprit.place, error=error, others=facts.others)
    found = on_bad_rows(dict.fromkeys(facts.rows, why))
    has_value = facts.kind != "error" or family(culprit.op) in HAVE_VALUES  # for more rows than the budget allows
    advice = found.advice + fact("or_fix_line", how=() if error else on_operation(culprit))
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
        return Diagnosis(Cause.EXPLOSION, fact("climbed", times=times))
    which = "other_batches_too" if facts.everywhere else "this_batch_only" if facts.is_compared else "not_compared"
    return Diagnosis(Cause.UNKNOWN, fact(which))


def on_bad_rows(*odd: Mapping[int, Facts]) -> Diagnosis:
    """Blame rows, given what is wrong with each, as each rank found it. No line of code is to blame for them."""
    reasons = {row: why for some in odd for row, why in some.items()}
    rows = tuple(sorted(reasons))

    def advice(*blamed: int) -> Facts:
        return fact("bad_rows", rows=[*blamed], why=reasons[blamed[0]])

    return Diagnosis(Cause.DATA, advice(*rows), rows=rows, reasons={row: advice(row) for row in rows})


def on_misled(usual: float, loss: float) -> Diagnosis:
    """The samples of updates that landed have a high loss at weights at which others have their usual one."""
    return Diagnosis(Cause.DATA, fact("bad_labels", usual=usual, loss=loss))


def on_changed(was: float, now: float) -> Diagnosis:
    """At verified weights the loss is high at once, which neither an update nor a learning rate can have done."""
    return Diagnosis(Cause.UNKNOWN, fact("loss_changed", was=was, now=now))


def _on_rows_again(rows: tuple[int, ...]) -> Diagnosis:
    """Nothing is odd about the rows but what they do, again and again: each time a whole batch is lost with them."""
    return Diagnosis(Cause.DATA, fact("rows_again", rows=[*rows]), None, rows)


def _on_ordinary_rows(rows: tuple[int, ...]) -> Diagnosis:
    """Nothing is odd about the rows: the weights may be at fault, so none is quarantined."""
    return Diagnosis(Cause.UNKNOWN, fact("ordinary_rows", rows=[*rows]), suspects=rows)


def on_operation(culprit: Culprit) -> Facts:
    inputs, name = culprit.inputs, _family(culprit.op)
    if name is None:
        reached = _reached(inputs) or {"plain": True}
        return fact("makes_nonfinite", where=culprit.place, **reached)
    # Of a quotient the denominator counts; and zeros say nothing about what is singular elsewhere.
    counted = inputs[1:2] if name == "div" and len(inputs) > 1 else inputs
    reached = {} if name in NOT_AT_ZERO else _reached(counted)
    return fact("singular", where=culprit.place, family=name, **reached)


def _on_overflow(culprit: Culprit) -> Facts:
    inputs = culprit.inputs
    is_one_sided = culprit.op in _EXPONENTIAL and culprit.op not in _EVEN
    highest = max((one["max"] for one in inputs if "max" in one), default=None)
    largest = highest if is_one_sided or highest is None else _largest(inputs)
    kind = next((one["dtype"] for one in inputs), "its type")
    return fact("overflows", where=culprit.place, largest=largest, dtype=kind)


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


def _reached(inputs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    if zeros := sum(one.get("zeros", 0) for one in inputs):
        return {"zeros": zeros}
    smallest = min((one["smallest"] for one in inputs if "smallest" in one), default=1.0)
    if smallest < _TINY:
        return {"smallest": smallest}
    lowest = min((one["min"] for one in inputs if "min" in one), default=0.0)
    return {"lowest": lowest} if lowest < 0 else {}


def _seen_with(rows: Sequence[int]) -> Facts:
    return fact("seen_with", rows=[*rows]) if rows else ()
