"""From what replays have shown to a cause. Pure: the same facts, the same diagnosis on every rank. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from resilient_train.diagnose import advice
from resilient_train.types import Cause, Culprit, Diagnosis

_CLIMB = 100.0  # times the usual: an explosion on its way
_LEAP = 1e4  # the same, at once: no task changes so much
_HUGE = 1e15  # sums and squares of it leave float32
_BEYOND = 1e18  # its square, and so a norm of it, leaves float32
_WITH_POLES = ("log", "div", "reciprocal", "rsqrt", "atanh", "lgamma")  # their infinities are not for want of range


@dataclass(frozen=True, slots=True)
class Facts:
    """What the replays of one rank have shown; `together` makes them those of all ranks."""

    reproduced: bool = False  # it happened again
    everywhere: bool = False  # with other rows in the batch, too
    is_compared: bool = False  # other rows could be tried
    culprit: Culprit | None = None
    kind: str = ""  # of what was born there: nan, inf
    is_total: bool = False  # in a single number
    after: Culprit | None = None  # what had broken in its armor before, and led there
    rows: tuple[int, ...] = ()  # of which each breaks a healthy batch
    rotten: Mapping[int, str] = field(default_factory=dict)  # what is odd about them
    batch_is_rotten: bool = False  # it holds values that are not finite
    layer: tuple[str, float] | None = None  # whose gradient is farthest above its usual, and how many times
    size: float = 0.0  # of its gradient, measured in doubles
    could_not: str = ""  # what a replay could not be made of, or see


def together(facts: Sequence[Facts]) -> Facts:
    """The facts of all ranks: the first that has a finding speaks, and all rows count."""
    again = [one for one in facts if one.reproduced]
    with_culprit = next((one for one in again if one.culprit), None)
    could_not = next((one.could_not for one in facts if one.could_not), "")
    if not again:
        return Facts(could_not=could_not)
    return Facts(
        reproduced=True,
        everywhere=any(one.everywhere for one in again),
        is_compared=any(one.is_compared for one in again),
        culprit=with_culprit.culprit if with_culprit else None,
        kind=with_culprit.kind if with_culprit else "",
        is_total=with_culprit.is_total if with_culprit else False,
        after=with_culprit.after if with_culprit else None,
        rows=tuple(sorted({row for one in again for row in one.rows})),
        rotten={row: why for one in again for row, why in one.rotten.items()},
        batch_is_rotten=any(one.batch_is_rotten for one in again),
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


def on_failed(failed: Mapping[int, str]) -> Diagnosis:
    """Rows that could not be fetched."""
    rows = tuple(sorted(failed))
    return Diagnosis(Cause.DATA, f"{_rows(rows)}: {failed[rows[0]]}; mend or remove {_it(rows)}.", None, rows)


def on_nonfinite(facts: Facts, climb: float, *, is_first: bool = False) -> Diagnosis:
    """A loss or gradient that is not finite, and came again; `is_first`: no update has landed yet."""
    culprit = facts.culprit
    rotten = tuple(row for row in facts.rows if row in facts.rotten)
    if rotten and (facts.batch_is_rotten or len(rotten) == len(facts.rows)):
        return _on_rotten(rotten, facts)
    if facts.batch_is_rotten and not facts.everywhere:
        why = "its rows are finite when they are fetched again" if not facts.could_not else facts.could_not
        return Diagnosis(Cause.DATA, f"The batch holds values that are not finite: {why}.")
    climbs = climb >= _CLIMB and (facts.everywhere or not facts.is_compared)
    if culprit is None:
        if climbs:
            return Diagnosis(Cause.EXPLOSION, _CLIMBED.format(times=climb))
        if facts.rows and not facts.everywhere and _BEYOND < facts.size < math.inf:
            return _on_beyond(facts)
        if facts.rows:
            return _on_ordinary(facts)
        unseen = facts.could_not or "no operation of the forward or backward was seen to make it"
        return Diagnosis(Cause.UNKNOWN, f"It comes again with this batch, but {unseen}.")
    where, first = advice.place(culprit.op, culprit.file, culprit.line), facts.after or culprit
    beside = f" {_rows(facts.rows).capitalize()} of the data {_gets(facts.rows)} there." if facts.rows else ""
    if _overflows(culprit, facts.kind):
        if climbs:
            return Diagnosis(Cause.EXPLOSION, f"{_CLIMBED.format(times=climb)} It broke first in {where}.", first)
        has_grown = _largest(culprit.inputs) > _HUGE or advice.is_loop(culprit.op)
        if facts.everywhere and not is_first and has_grown:
            return Diagnosis(Cause.EXPLOSION, f"{_LED_THERE} It broke first in {where}.", first)
        told = advice.on_overflow(where, culprit.inputs)
        found = Diagnosis(Cause.OVERFLOW, told, culprit, mendable=not facts.is_total)
    else:
        found = Diagnosis(
            Cause.OPERATION, advice.on_operation(where, culprit.op, culprit.inputs), culprit, mendable=True
        )
    if facts.after is not None:
        told = advice.on_follower(where, advice.place(first.op, first.file, first.line))
        found = replace(found, advice=told, culprit=first, follower=culprit)
    return replace(found, advice=found.advice + beside)


def again(known: Diagnosis) -> Diagnosis:
    """The same line once more: of other rows, so nothing is said of those."""
    culprit = known.culprit
    if culprit is None or known.cause not in (Cause.OPERATION, Cause.OVERFLOW):
        return known
    where = advice.place(culprit.op, culprit.file, culprit.line)
    if (last := known.follower) is not None:
        return replace(known, advice=advice.on_follower(advice.place(last.op, last.file, last.line), where))
    if known.cause is Cause.OVERFLOW:
        return replace(known, advice=advice.on_overflow(where, culprit.inputs))
    return replace(known, advice=advice.on_operation(where, culprit.op, culprit.inputs))


def on_spike(facts: Facts, climb: float, jump: float = 1.0) -> Diagnosis:
    """A loss or gradient norm `jump` times the usual, which had climbed to `climb` times it before."""
    layer = ""
    if facts.layer is not None:
        layer = f" The gradient of `{facts.layer[0]}` is farthest above its usual, {facts.layer[1]:.3g} times."
    if facts.rows and not facts.everywhere:
        rotten = tuple(row for row in facts.rows if row in facts.rotten)
        if rotten:
            return _on_rotten(rotten, facts)
        return _on_ordinary(facts, layer)
    if facts.everywhere and (climb >= _CLIMB or jump >= _LEAP):
        return Diagnosis(Cause.EXPLOSION, _CLIMBED.format(times=max(climb, jump)) + layer)
    if facts.everywhere:
        why = "if it was changed what is trained on, declare it with checks.expect; else lower the learning rate"
        return Diagnosis(Cause.UNKNOWN, f"Other batches do the same at these weights: {why}.{layer}")
    if not facts.is_compared:
        if climb >= _CLIMB:
            return Diagnosis(Cause.EXPLOSION, _CLIMBED.format(times=climb) + layer)
        return Diagnosis(Cause.UNKNOWN, f"It comes again with this batch; no other rows could be tried.{layer}")
    return Diagnosis(
        Cause.UNKNOWN,
        "This batch does it, other batches do not, and no row of it alone: if many follow, lower the learning rate."
        f"{layer}",
    )


def on_misled(rows: tuple[int, ...], usual: float, loss: float) -> Diagnosis:
    """The samples of updates that landed have a high loss at weights at which others have their usual one."""
    where = f"{_rows(rows).capitalize()} of the data" if rows else "The samples of these updates"
    have = "has" if len(rows) == 1 else "have"
    told = f"{where} {have} a loss of up to {loss:.4g} at weights at which earlier samples have {usual:.4g}"
    return Diagnosis(Cause.DATA, f"{told}: look for wrong labels or targets there.", None, rows)


def on_changed(was: float, now: float) -> Diagnosis:
    """At weights that are proven the loss is high at once: no update can have done that, and no rate."""
    told = (
        f"At weights at which the loss was {was:.4g} it is {now:.4g}: look for wrong labels, or for what changed in the"
    )
    return Diagnosis(
        Cause.UNKNOWN, f"{told} data or the objective; a change on purpose is declared with checks.expect."
    )


def on_far_out(rotten: Mapping[int, str]) -> Diagnosis:
    """Rows that hold values far beyond those of others."""
    rows = tuple(sorted(rotten))
    told = f"{_rows(rows).capitalize()} of the data: {rotten[rows[0]]}; mend or remove {_it(rows)}."
    return Diagnosis(Cause.DATA, told, None, rows)


def on_untried(why: str) -> Diagnosis:
    """The step could not be replayed."""
    return Diagnosis(Cause.UNKNOWN, f"It could not be tried again: {why}.")


TRANSIENT = Diagnosis(
    Cause.TRANSIENT,
    "The same batch at the same weights is healthy when it is tried again: if it returns, suspect the hardware, or "
    "code outside of the model.",
)
_LED_THERE = "Every batch breaks at the weights that the last updates have made: lower the learning rate."
_CLIMBED = "Gradients or losses climbed to {times:.3g} times their usual before it broke: lower the learning rate."


def _on_ordinary(facts: Facts, layer: str = "") -> Diagnosis:
    """Nothing is odd about the rows: it may as well be the weights that take them badly, so nobody is put away."""
    told = f"Look at {_rows(facts.rows)} of the data: the batch is ordinary without {_it(facts.rows)}."
    return Diagnosis(Cause.UNKNOWN, told + layer)


def _on_beyond(facts: Facts) -> Diagnosis:
    """All that was computed is finite, and too large to be measured: no line is to blame, and only these rows do it."""
    rows = facts.rows
    told = f"{_rows(rows).capitalize()} of the data {'takes' if len(rows) == 1 else 'take'} the gradient to"
    mend = f"clamp or scale what is computed of {_it(rows)}, or remove {_it(rows)}"
    return Diagnosis(Cause.OVERFLOW, f"{told} {facts.size:.3g}, which no update can use: {mend}.", None, rows)


def _on_rotten(rows: tuple[int, ...], facts: Facts) -> Diagnosis:
    """Where rows are to blame, no line is: it did what it could with them."""
    told = f"{_rows(rows).capitalize()} of the data: {facts.rotten[rows[0]]}; mend or remove {_it(rows)}."
    return Diagnosis(Cause.DATA, told, None, rows)


def _overflows(culprit: Culprit, kind: str) -> bool:
    """Whether an operation went beyond its type's range rather than meeting a point where it has no value."""
    largest = _largest(culprit.inputs)
    if advice.family(culprit.op) is None:
        return largest > _HUGE or (advice.is_plain(culprit.op) and (kind == "inf" or advice.is_loop(culprit.op)))
    if culprit.op == "pow":
        return kind == "inf" and largest > 1
    return largest > _HUGE and culprit.op not in _WITH_POLES


def _largest(inputs: Sequence[Mapping[str, Any]]) -> float:
    return max((max(abs(one["min"]), abs(one["max"])) for one in inputs if "max" in one), default=0.0)


def _rows(rows: Sequence[int]) -> str:
    shown = ", ".join(str(row) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
    return f"row{'s' if len(rows) > 1 else ''} {shown}"


def _it(rows: Sequence[int]) -> str:
    return "it" if len(rows) == 1 else "them"


def _gets(rows: Sequence[int]) -> str:
    return "gets" if len(rows) == 1 else "get"
