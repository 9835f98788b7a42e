"""From what replays have shown to a cause and advice: tables of rules, of which the first that applies answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from resilient_train.ground.operations import HAVE_VALUES, family
from resilient_train.ground.types import Cause, Culprit, Diagnosis, Facts, fact

HUGE = 1e15  # sums and squares of it leave float32
_TINY = 1e-12
_LARGEST_EXPONENT = 88.0  # of e, in float32

# Operations that are singular somewhere: those that are so where another one is, by that one, and the others.
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
    **dict.fromkeys(("sqrt", "rsqrt", "pow", "atanh", "binary_cross_entropy", "lgamma"), ""),
}
_FAMILIES = {name: op for op, alike in _ALIKE.items() for name in (op, *alike.split())}
NOT_AT_ZERO = ("softmax", "linalg", "acos", "atanh", "mean", "loss", "layer_norm", "std")
WITH_POLES = ("log", "log2", "log10", "log1p", "div", "reciprocal", "rsqrt", "atanh", "lgamma")  # infinite there
_ONE_SIDED = ("exp", "exp2", "expm1")
_EXPONENTIAL = (*_ONE_SIDED, "cosh", "sinh", "i0", "special_i0", "special_i1")
PRODUCTS = ("prod", "cumprod", "det", "linalg_det")  # of many numbers; infinite by overflow alone
LOOPS = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # one product after the other, whose values cannot be seen


def is_plain(op: str) -> bool:
    return op in _EXPONENTIAL or _family(op) is None


def _family(op: str) -> str | None:
    """The family of an operation that is singular somewhere; None for plain arithmetic, which can only overflow."""
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


_CLIMB = 100.0  # times the usual: an explosion on its way
_LEAP = 1e4  # the same, at once: no task changes so much
_START = 32  # updates in which weights are led astray from where they began: a line that breaks then is not the cause
_FIRST = 4  # updates in which a rate that is far too high does so, whatever the losses say
_BEYOND = 1e18  # its square, and so a norm of it, leaves float32


@dataclass(frozen=True, slots=True)
class Observations:
    """What the replays of one rank have shown; `merge_ranks` combines those of all ranks."""

    reproduced: bool = False  # the replay broke too
    everywhere: bool = False  # it broke with other rows in the batch, too
    is_compared: bool = False  # other rows could be tried
    culprit: Culprit | None = None  # the operation that broke
    kind: str = ""  # of what it made: nan, inf; or it raised: error, domain
    is_scalar: bool = False  # its result is a single number
    was_given: bool = False  # it did not make that: the program gave it to it
    after: Culprit | None = None  # the first patched operation whose values were repaired before it broke
    is_tried: bool = False  # that operation is patched and broke again, or cannot be patched
    rows: tuple[int, ...] = ()  # each of them breaks a healthy batch
    odd: Mapping[int, Facts] = field(default_factory=dict)  # by row of `rows`: which of its values are unusual
    others: int = 0  # rows that were tried where an operation of data alone breaks on `rows`, and hardly on any other
    have_passed: bool = False  # the rows were trained on before, in an earlier epoch
    batch_is_bad: bool = False  # it holds values that are not finite
    size: float = 0.0  # of the gradient, measured in doubles
    failure: Facts = ()  # why a replay was impossible
    # What was known before: the same on all ranks.
    climb: float = 1.0  # how many times their usual losses or norms had become
    leap: float = 1.0  # how many times the newest is
    landed: int = 0  # the last step
    error: str = ""  # that was raised

    @property
    def blames_rows(self) -> bool:
        return bool(self.odd) and (self.batch_is_bad or len(self.odd) == len(self.rows))

    @property
    def blamed(self) -> tuple[int, ...]:
        return () if self.everywhere else self.rows

    @property
    def rows_left(self) -> tuple[int, ...]:
        return self.blamed if self.is_tried else ()

    @property
    def only_some(self) -> bool:
        return self.is_compared and not self.everywhere

    @property
    def climbs(self) -> bool:
        return self.climb >= _CLIMB and not self.only_some

    @property
    def leaps(self) -> bool:
        """Whether the loss has leaped to where all batches break, farther than it does near a pole."""
        has_pole = self.culprit is not None and self.culprit.op in WITH_POLES
        most, until = (HUGE, _FIRST) if has_pole else (_LEAP, _START)
        return self.everywhere and self.leap >= most and self.landed < until

    @property
    def broken(self) -> Culprit:
        assert self.culprit is not None
        return self.culprit

    @property
    def overflows(self) -> bool:
        return self.culprit is not None and overflows(self.culprit, self.kind)

    @property
    def is_thrown(self) -> bool:
        """Whether every batch overflows at weights that no healthy update can have made."""
        if not (self.overflows and self.everywhere and self.landed) or self.was_given:
            return False
        inputs = self.broken.inputs
        is_early = self.landed < _FIRST and all(one.get("dtype") != "float16" for one in inputs)
        return is_early or largest(inputs) > HUGE or self.broken.op in LOOPS

    @property
    def has_value(self) -> bool:
        return self.culprit is not None and (self.kind == "domain" or family(self.culprit.op) in HAVE_VALUES)

    @property
    def times(self) -> float:
        return max(self.climb, self.leap)

    @property
    def where(self) -> Mapping[str, Any] | None:
        return self.culprit.place if self.culprit is not None else None


def merge_ranks(observed: Sequence[Observations]) -> Observations:
    """Combine what all ranks observed: the first one that found an operation names it, and rows of all count."""
    again = [one for one in observed if one.reproduced]
    failure = next((one.failure for one in observed if one.failure), ())
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


Says = Callable[[Observations], Facts]


def _says(kind: str, *names: str) -> Says:
    """Say a fact with the values of these names."""

    def advice(seen: Observations) -> Facts:
        values = {name: getattr(seen, name) for name in names}
        return fact(kind, **{name: [*one] if isinstance(one, tuple) else one for name, one in values.items()})

    return advice


def on_bad_rows(*odd: Mapping[int, Facts]) -> Diagnosis:
    """Blame rows, given what is wrong with each, as each rank found it. No line of code is to blame for them."""
    reasons = {row: why for some in odd for row, why in some.items()}
    rows = tuple(sorted(reasons))

    def advice(*blamed: int) -> Facts:
        return fact("bad_rows", rows=[*blamed], why=reasons[blamed[0]])

    return Diagnosis(Cause.DATA, advice(*rows), rows=rows, reasons={row: advice(row) for row in rows})


def _of_line(seen: Observations) -> Facts:
    """What fails on the values of a patch is not the fault of its own line."""
    if seen.after is not None:
        found = fact("follows_patch", where=seen.where, patched=seen.after.place)
    else:
        found = on_overflow(seen.broken) if seen.overflows else on_operation(seen.broken)
    return found + _seen_with(seen)


def _seen_with(seen: Observations) -> Facts:
    return fact("seen_with", rows=[*seen.rows]) if seen.rows else ()


def _always(seen: Observations) -> bool:
    return True


def _nothing(seen: Observations) -> tuple[()]:
    return ()


_rows = attrgetter("rows")


@dataclass(frozen=True, slots=True)
class Rule:
    """When it applies, it says the cause and what to do."""

    name: str  # `benchmarks/worth.py` leaves it out by that
    when: Callable[[Observations], object]
    cause: Cause
    advice: Says = _nothing
    bad: Callable[[Observations], Mapping[int, Facts]] | None = None  # rows, and what is wrong with each
    rows: Callable[[Observations], tuple[int, ...]] = _nothing
    suspects: Callable[[Observations], tuple[int, ...]] = _nothing
    names_line: bool = False  # the patched one, if what fails follows from it
    patchable: Callable[[Observations], object] = _nothing

    def answer(self, seen: Observations) -> Diagnosis:
        found = on_bad_rows(self.bad(seen)) if self.bad is not None else Diagnosis(self.cause, rows=self.rows(seen))
        return replace(
            found,
            advice=found.advice + self.advice(seen),
            culprit=(seen.after or seen.culprit) if self.names_line else None,
            suspects=self.suspects(seen),
            patchable=bool(self.patchable(seen)),
            symptom=seen.culprit if self.names_line and seen.after else None,
        )


def _rare(kind: str, *names: str) -> Callable[[Observations], Mapping[int, Facts]]:
    """What rows give an operation of data alone: a value in its place would be made up, like data."""
    return lambda seen: dict.fromkeys(seen.blamed, _says(kind, "where", *names)(seen))


NOT_FINITE = (
    Rule("bad_rows", lambda seen: seen.blames_rows, Cause.DATA, bad=lambda seen: seen.odd),
    Rule(
        "bad_batch",
        lambda seen: seen.batch_is_bad and not seen.everywhere,
        Cause.DATA,
        _says("batch_not_finite", "failure"),
    ),
    Rule(
        "is_given",
        lambda seen: seen.was_given,
        Cause.OPERATION,
        lambda seen: fact("is_given", where=seen.where) + _seen_with(seen),
        rows=_rows,
        names_line=True,
    ),
    Rule(  # a line that overflows is where it shows, not the cause
        "climbed",
        lambda seen: seen.leaps or (seen.climbs and (seen.culprit is None or seen.overflows)),
        Cause.EXPLOSION,
        _says("climbed", "times", "where"),
    ),
    Rule("thrown_there", lambda seen: seen.is_thrown, Cause.EXPLOSION, _says("every_batch_breaks", "where")),
    # No operation was seen to break.
    Rule(  # all that is computed of them is finite
        "gradient_too_large",
        lambda seen: seen.culprit is None and seen.blamed and _BEYOND < seen.size < math.inf,
        Cause.OVERFLOW,
        _says("gradient_too_large", "rows", "size"),
        rows=_rows,
    ),
    Rule(
        "ordinary_rows",
        lambda seen: seen.culprit is None and seen.rows and seen.climb >= _CLIMB,
        Cause.UNKNOWN,
        _says("ordinary_rows", "rows"),
        suspects=_rows,
    ),
    Rule(  # whatever it is that they do
        "rows_fail",
        lambda seen: seen.culprit is None and seen.rows,
        Cause.UNKNOWN,
        _says("rows_fail", "rows"),
        rows=_rows,
    ),
    Rule("unseen", lambda seen: seen.culprit is None, Cause.UNKNOWN, _says("reproducible", "failure")),
    # An operation broke.
    Rule(
        "overflow",
        lambda seen: seen.overflows,
        Cause.OVERFLOW,
        _of_line,
        rows=attrgetter("rows_left"),
        names_line=True,
        patchable=lambda seen: not seen.is_scalar or seen.broken.op in PRODUCTS,  # of many numbers, a product too
    ),
    Rule(
        "rare_rows",
        lambda seen: seen.others and not seen.everywhere,
        Cause.DATA,
        lambda seen: fact("or_fix_line", how=on_operation(seen.broken)),
        bad=_rare("row_breaks", "others"),
        names_line=True,
        patchable=_always,  # for more rows than the budget allows
    ),
    Rule(
        "no_loss",
        lambda seen: seen.broken.op == "ctc_loss" and seen.blamed and not seen.after,
        Cause.DATA,
        bad=_rare("no_loss"),
    ),
    Rule(
        "operation",
        _always,
        Cause.OPERATION,
        _of_line,
        rows=attrgetter("rows_left"),
        names_line=True,
        patchable=_always,
    ),
)

ERRORS = (  # of user code, in most cases ones that other batches at the same weights do not raise
    NOT_FINITE[0],
    Rule(
        "rare_rows",
        lambda seen: seen.kind == "error" and seen.others and not seen.everywhere,
        Cause.DATA,
        _says("or_fix_line"),
        bad=_rare("row_raises", "error", "others"),
        names_line=True,
        patchable=lambda seen: seen.has_value,
    ),
    Rule(
        "thrown_there",
        lambda seen: seen.landed < _FIRST and seen.is_thrown and (seen.has_value or seen.kind in ("nan", "inf")),
        Cause.EXPLOSION,
        _says("every_batch_breaks", "where"),
    ),
    Rule(
        "then_raised",
        lambda seen: seen.kind in ("nan", "inf"),
        Cause.OPERATION,
        lambda seen: on_operation(seen.broken) + fact("then_raised", error=seen.error),
        names_line=True,
        patchable=_always,
    ),
    Rule(
        "raised",
        lambda seen: seen.has_value,
        Cause.OPERATION,
        _says("raised", "where", "error"),
        names_line=True,
        patchable=_always,
    ),
    Rule(
        "raised_now",
        lambda seen: seen.culprit and seen.blamed and seen.have_passed,
        Cause.OPERATION,
        _says("raised_now", "where", "error", "rows"),
        rows=_rows,
        names_line=True,
    ),
    Rule("rows_raised", lambda seen: seen.blamed, Cause.DATA, _says("rows_raised", "rows", "error"), rows=_rows),
    Rule(
        "batches_raise",
        _always,
        Cause.UNKNOWN,
        _says("batches_raise", "error", "everywhere", "only_some", "is_compared"),
        names_line=True,
    ),
)

SPIKES = (  # of the loss or the gradient norm, which were what is usual before
    Rule("bad_rows", lambda seen: seen.blamed and seen.odd, Cause.DATA, bad=lambda seen: seen.odd),
    Rule(  # nothing is odd about them, and the weights may be at fault: none is quarantined
        "ordinary_rows", lambda seen: seen.blamed, Cause.UNKNOWN, _says("ordinary_rows", "rows"), suspects=_rows
    ),
    Rule(
        "climbed",
        lambda seen: seen.climbs or (seen.everywhere and seen.leap >= _LEAP),
        Cause.EXPLOSION,
        _says("climbed", "times"),
    ),
    Rule("other_batches_too", lambda seen: seen.everywhere, Cause.UNKNOWN, _says("other_batches_too")),
    Rule("this_batch_only", lambda seen: seen.is_compared, Cause.UNKNOWN, _says("this_batch_only")),
    Rule("not_compared", _always, Cause.UNKNOWN, _says("not_compared")),
)


def rule_for(rules: Sequence[Rule], seen: Observations) -> Rule:
    return next(rule for rule in rules if rule.when(seen))


TRANSIENT = Diagnosis(Cause.TRANSIENT, fact("passed_on_replay"))
