"""From what replays have shown to a cause and advice: of the tests of a function, the first that holds answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from resilient_train.ground.operations import GIVE, HAVE_VALUES, family
from resilient_train.ground.types import Cause, Culprit, Diagnosis, Facts, fact
from resilient_train.parts.code_lines import Line

HUGE = 1e15  # sums and squares of it leave float32
_TINY = 1e-12

# Operations that are singular somewhere: those that are so where another one is, by that one, and the others.
_ALIKE = {
    "log": "log2 log10 log1p logit xlogy digamma polygamma erfinv lgamma",
    "div": "reciprocal fmod remainder floor_divide addcdiv cumprod prod rsqrt",
    "norm": "linalg_norm linalg_vector_norm vector_norm dist cdist pairwise_distance linalg_matrix_norm "
    "triplet_margin_loss renorm frobenius_norm normalize cosine_similarity cosine_embedding_loss weight_norm atan2 "
    "angle hypot",
    "std": "std_mean var var_mean layer_norm batch_norm instance_norm group_norm rms_norm",
    "acos": "asin acosh atanh",
    "softmax": "log_softmax logsumexp scaled_dot_product_attention multi_head_attention_forward",
    "mean": "nanmean median adaptive_avg_pool2d",
    "linalg": "inverse pinverse svd logdet slogdet det cholesky lstsq",
    "loss": "cross_entropy nll_loss ctc_loss kl_div gaussian_nll_loss",
    **dict.fromkeys(("sqrt", "pow", "binary_cross_entropy"), ""),
}
_FAMILIES = {name: op for op, alike in _ALIKE.items() for name in (op, *alike.split())}
WITH_POLES = ("log", "log2", "log10", "log1p", "div", "reciprocal", "rsqrt", "atanh", "lgamma")  # infinite there
_EXPONENTIAL = ("exp", "exp2", "expm1", "cosh", "sinh", "i0", "special_i0", "special_i1", "poisson_nll_loss")
PRODUCTS = ("prod", "cumprod", "det", "linalg_det")  # of many numbers; infinite by overflow alone
LOOPS = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # one product after the other, whose values cannot be seen


def is_plain(op: str) -> bool:
    return op in _EXPONENTIAL or _family(op) is None


def _family(op: str) -> str | None:
    """The family of an operation that is singular somewhere; None for plain arithmetic, which can only overflow."""
    return _FAMILIES.get(op, "linalg" if op.startswith("linalg_") else None)


def overflows(origin: Origin) -> bool:
    """Whether an operation exceeded the range of its type, rather than met a point where it has no value."""
    op, kind, size = origin.op, origin.kind, largest(origin.inputs)
    if op in _EXPONENTIAL:
        return True
    if _family(op) is None:  # plain arithmetic, or a function of the user's own
        return size > HUGE or kind == "inf" or op in LOOPS
    if op in PRODUCTS and kind == "inf":
        return True
    if op == "pow":
        is_at_zero = any(one.get("smallest", 1.0) < _TINY for one in origin.inputs[:1])
        return kind == "inf" and (size > HUGE or (size > 1 and not is_at_zero))
    return size > HUGE and op not in WITH_POLES


def largest(inputs: Sequence[Mapping[str, Any]]) -> float:
    return max((max(abs(one["min"]), abs(one["max"])) for one in inputs if "max" in one), default=0.0)


def on_operation(origin: Origin) -> Facts:
    name = _family(origin.op)
    return fact("singular" if name is not None else "makes_nonfinite", where=origin.culprit.place, family=name)


_CLIMB = 100.0  # times the usual: an explosion on its way
_LEAP = 1e4  # the same, at once: no task changes so much
_START = 32  # updates in which weights are led astray from where they began: a line that breaks then is not the cause
_FIRST = 4  # updates in which a rate that is far too high does so, whatever the losses say


@dataclass(frozen=True, slots=True)
class Origin:
    """One call of an operation; its `kind` says what that made of values that are finite."""

    op: str
    line: Line | None
    call: int = -1  # its number in its forward
    is_of_data: bool = False  # all that it was given comes from the batch
    phase: str = "forward"  # or backward
    kind: str = ""  # nan, inf; domain or error, if it raised
    inputs: tuple[Mapping[str, Any], ...] = ()
    is_scalar: bool = False  # its result is a single number
    was_given: bool = False  # it did not make that: the program gave it to it, as a constant or from outside of torch
    after: Origin | None = None  # the first patched operation that broke on the way to it: this one is a consequence
    of_inputs: Origin | None = None  # of inputs that are not finite

    @property
    def culprit(self) -> Culprit:
        """The same as a record."""
        line = self.line or Line("", 0)
        return Culprit(self.phase, self.op, line.module, line.file, line.line, self.inputs)


@dataclass(frozen=True, slots=True)
class Observations:
    """What the replays of one rank have shown; `merge_ranks` combines those of all ranks."""

    reproduced: bool = False  # the replay broke too
    everywhere: bool = False  # it broke with other rows in the batch, too
    is_compared: bool = False  # other rows could be tried
    origin: Origin | None = None  # the operation that broke
    is_tried: bool = False  # it, or the patched one that it is a consequence of, is patched or cannot be
    rows: tuple[int, ...] = ()  # each of them breaks a healthy batch
    odd: Mapping[int, Facts] = field(default_factory=dict)  # by row of `rows`: which of its values are unusual
    is_rare: bool = False  # an operation of data alone breaks on `rows`, and on hardly any other
    is_beyond: bool = False  # the gradient is finite in doubles alone
    batch_is_bad: bool = False  # it holds values that are not finite
    failure: Facts = ()  # why a replay was impossible
    # What was known before: the same on all ranks.
    climb: float = 1.0  # how many times their usual losses or norms had become
    leap: float = 1.0  # how many times the newest is
    landed: int = 0  # the last step
    error: str = ""  # that was raised

    @property
    def culprit(self) -> Culprit | None:
        return self.origin.culprit if self.origin is not None else None

    @property
    def blamed(self) -> tuple[int, ...]:
        return () if self.everywhere else self.rows

    @property
    def blames_rows(self) -> bool:
        return bool(self.odd) and (self.batch_is_bad or len(self.odd) == len(self.rows))

    @property
    def climbs(self) -> bool:
        return self.climb >= _CLIMB and (self.everywhere or not self.is_compared)

    @property
    def leaps(self) -> bool:
        """Whether the loss has leaped to where all batches break, as it does not do near a pole alone."""
        has_pole = self.origin is not None and self.origin.op in WITH_POLES
        return self.everywhere and self.leap >= _LEAP and self.landed < _START and not has_pole

    @property
    def overflows(self) -> bool:
        return self.origin is not None and overflows(self.origin)

    @property
    def is_thrown(self) -> bool:
        """Whether every batch overflows at weights that no healthy update can have made."""
        if self.origin is None or not (self.overflows and self.everywhere and self.landed) or self.origin.was_given:
            return False
        inputs = self.origin.inputs
        is_early = self.landed < _FIRST and all(one.get("dtype") != "float16" for one in inputs)
        return is_early or largest(inputs) > HUGE or self.origin.op in LOOPS

    @property
    def where(self) -> Mapping[str, Any] | None:
        return self.culprit.place if self.culprit is not None else None

    def with_line(self, found: Diagnosis, *, patchable: bool = True) -> Diagnosis:
        """Blame the operation, or the patched one whose values it broke on, too."""
        after = self.origin.after if self.origin is not None else None
        line, symptom = (after.culprit, self.culprit) if after is not None else (self.culprit, None)
        return replace(found, culprit=line, symptom=symptom, patchable=patchable)


def merge_ranks(observed: Sequence[Observations]) -> Observations:
    """Combine what all ranks observed: the first one that found an operation names it, and rows of all count."""
    again = [one for one in observed if one.reproduced]
    failure = next((one.failure for one in observed if one.failure), ())
    if not again:
        return Observations(failure=failure)
    places = {tuple(one.where.values()) for one in again if one.where is not None}
    return replace(
        next((one for one in again if one.origin), again[0]),
        is_rare=len(places) == 1 and all(one.is_rare for one in again if one.rows or one.origin),
        everywhere=any(one.everywhere for one in again),
        is_compared=any(one.is_compared for one in again),
        rows=tuple(sorted({row for one in again for row in one.rows})),
        odd={row: why for one in again for row, why in one.odd.items()},
        batch_is_bad=any(one.batch_is_bad for one in again),
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


def on_bad_rows(*odd: Mapping[int, Facts]) -> Diagnosis:
    """Blame rows, given what is wrong with each, as each rank found it. No line of code is to blame for them."""
    reasons = {row: why for some in odd for row, why in some.items()}
    rows = tuple(sorted(reasons))

    def advice(*blamed: int) -> Facts:
        return fact("bad_rows", rows=[*blamed], why=reasons[blamed[0]])

    return Diagnosis(Cause.DATA, advice(*rows), rows=rows, reasons={row: advice(row) for row in rows})


def of_nonfinite(seen: Observations) -> Diagnosis:
    """Explain a loss, a gradient or a batch that is not finite."""
    origin, rows, where = seen.origin, [*seen.rows], seen.where
    if seen.blames_rows:
        return on_bad_rows(seen.odd)
    if seen.batch_is_bad and not seen.everywhere:
        return Diagnosis(Cause.DATA, fact("batch_not_finite", failure=[*seen.failure]))
    seen_with = fact("seen_with", rows=rows) if rows else ()
    if origin is not None and origin.was_given:
        found = Diagnosis(Cause.OPERATION, fact("is_given", where=where) + seen_with, rows=seen.rows)
        return seen.with_line(found, patchable=seen.everywhere and origin.op in GIVE and origin.kind == "nan")
    if seen.leaps or (seen.climbs and (origin is None or seen.overflows)):  # the line is where it shows, not the cause
        return Diagnosis(Cause.EXPLOSION, fact("climbed", times=max(seen.climb, seen.leap), where=where))
    if seen.is_thrown:
        return Diagnosis(Cause.EXPLOSION, fact("every_batch_breaks", where=where))
    if origin is None:
        return _of_unseen(seen)
    if seen.is_rare and not seen.everywhere and not seen.overflows:
        return _on_rare_rows(seen, fact("row_breaks", where=where), on_operation(origin))
    if origin.op == "ctc_loss" and seen.blamed and origin.after is None and not seen.overflows:
        return on_bad_rows(dict.fromkeys(seen.blamed, fact("no_loss", where=where)))
    if origin.after is not None:  # what fails on the values of a patch is not the fault of its own line
        advice = fact("follows_patch", where=where, patched=origin.after.culprit.place)
    else:
        advice = fact("overflows", where=where) if seen.overflows else on_operation(origin)
    cause = Cause.OVERFLOW if seen.overflows else Cause.OPERATION
    is_patchable = not seen.overflows or not origin.is_scalar or origin.op in PRODUCTS  # of many numbers, a product too
    found = Diagnosis(cause, advice + seen_with, rows=seen.blamed if seen.is_tried else ())
    return seen.with_line(found, patchable=is_patchable)


def _of_unseen(seen: Observations) -> Diagnosis:
    """No operation was seen to break: all that is computed may be finite."""
    rows = [*seen.rows]
    if rows and seen.climb >= _CLIMB and not seen.is_beyond:
        return Diagnosis(Cause.UNKNOWN, fact("ordinary_rows", rows=rows), suspects=seen.rows)
    if rows:  # whatever it is that they do
        cause = Cause.OVERFLOW if seen.is_beyond else Cause.UNKNOWN
        return Diagnosis(cause, fact("rows_fail", rows=rows), rows=seen.rows)
    return Diagnosis(Cause.UNKNOWN, fact("reproducible", failure=[*seen.failure]))


def _on_rare_rows(seen: Observations, why: Facts, how: Facts = ()) -> Diagnosis:
    """Blame what rows give an operation of data alone: a value in its place would be made up, like data."""
    found = on_bad_rows(dict.fromkeys(seen.blamed, why))
    return seen.with_line(replace(found, advice=found.advice + fact("or_fix_line", how=how)), patchable=False)


def of_error(seen: Observations) -> Diagnosis:
    """Explain an exception of user code: in most cases one that other batches at the same weights do not raise."""
    origin, rows, where, error = seen.origin, [*seen.blamed], seen.where, seen.error
    has_value = origin is not None and (origin.kind == "domain" or family(origin.op) in HAVE_VALUES)
    if seen.blames_rows:
        return on_bad_rows(seen.odd)
    if origin is not None and origin.kind == "error" and seen.is_rare and rows:
        return _on_rare_rows(seen, fact("row_raises", where=where, error=error))
    is_of_nonfinite = origin is not None and origin.kind in ("nan", "inf")
    if seen.landed < _FIRST and seen.is_thrown and (has_value or is_of_nonfinite):
        return Diagnosis(Cause.EXPLOSION, fact("every_batch_breaks", where=where))
    if origin is not None and is_of_nonfinite:
        return seen.with_line(Diagnosis(Cause.OPERATION, on_operation(origin) + fact("then_raised", error=error)))
    if has_value:
        return seen.with_line(Diagnosis(Cause.OPERATION, fact("raised", where=where, error=error)))
    if rows:
        return Diagnosis(Cause.DATA, fact("rows_raised", rows=rows, error=error), rows=seen.blamed)
    why = fact("batches_raise", error=error, everywhere=seen.everywhere)
    return seen.with_line(Diagnosis(Cause.UNKNOWN, why), patchable=False)


def of_spike(seen: Observations) -> Diagnosis:
    """Explain a loss or a gradient norm far above what was usual before."""
    if seen.blamed and seen.odd:
        return on_bad_rows(seen.odd)
    if seen.blamed:  # nothing is odd about them, and the weights may be at fault: none is quarantined
        return Diagnosis(Cause.UNKNOWN, fact("ordinary_rows", rows=[*seen.rows]), suspects=seen.rows)
    if seen.climbs or (seen.everywhere and seen.leap >= _LEAP):
        return Diagnosis(Cause.EXPLOSION, fact("climbed", times=max(seen.climb, seen.leap)))
    alike = "other_batches_too" if seen.everywhere else "this_batch_only" if seen.is_compared else "not_compared"
    return Diagnosis(Cause.UNKNOWN, fact(alike))
