"""The drills of a run, as the journal has them: who reviews it should know which faults were on purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resilient_train.types import Anomaly, Cause, Diagnosis, Incident, Outcome, Signal

FIRED = "drill_fired"  # the kind of an entry of the journal
_LEAVE_DAMAGE = {"loss_spike", "hot_lr", "bit_flip", "bad_moments"}  # that may be noticed later
_NOTICED_WITHIN = 400  # ticks; of a weight that nothing depends on, never
_END_PROCESS = {"crash": Signal.CRASH, "hang": Signal.HANG}
_BY_ROWS = {Cause.DATA, Cause.EXPLOSION, Cause.OVERFLOW, Cause.UNKNOWN}


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault of a drill that struck."""

    fault: str
    tick: int  # 0: it is in the data, from the first sample to the last
    until: int  # the last tick of its stretch
    rows: frozenset[int] | None = None  # None: not known


def strikes(entries: Iterable[Mapping[str, Any]]) -> tuple[Strike, ...]:
    """Return what struck in a run so far, in the order in which it did; of damaged entries, nothing."""
    found = []
    for entry in entries:
        name, tick, until, rows = (entry.get(key) for key in ("name", "tick", "until", "rows"))
        if entry["kind"] == FIRED and isinstance(name, str) and type(tick) is int:
            known = frozenset(one for one in rows if type(one) is int) if isinstance(rows, list) else None
            found.append(Strike(name, tick, until if type(until) is int else tick, known))
    return tuple(found)


def on_purpose(struck: Sequence[Strike]) -> str:
    """Say that there was a drill, in a sentence to append; nothing where there was none."""
    times = Counter(one.fault for one in struck)
    faults = [fault if count == 1 else f"{fault} {count:,} times" for fault, count in times.items()]
    return f" This run has a drill: faults on purpose ({', '.join(faults)})." if faults else ""


def made_by(struck: Sequence[Strike], anomaly: Anomaly, diagnosis: Diagnosis, before: Sequence[Incident]) -> str:
    """Name the faults of a drill that caused an incident, at once or by the damage they left; empty: none did."""
    made = [one for one in struck if _struck(one, anomaly, diagnosis)]
    if not made and not diagnosis.rows:
        made = [one for one in struck if one.tick and _is_left_by(one, anomaly, diagnosis, before)][-1:]
    if not made and not diagnosis.rows and diagnosis.culprit is None and diagnosis.cause in _BY_ROWS:
        made = [one for one in struck if not one.tick]
    return ", ".join(dict.fromkeys(one.fault for one in made))


def _struck(one: Strike, anomaly: Anomaly, diagnosis: Diagnosis) -> bool:
    """Say whether it was in this very update, or in these rows."""
    if one.fault in _END_PROCESS:
        return anomaly.signal is _END_PROCESS[one.fault] and abs(anomaly.tick - one.tick) <= 1
    if diagnosis.cause is Cause.PROCESS:
        return False
    if not one.tick:
        return bool(diagnosis.rows) and (one.rows is None or one.rows.issuperset(diagnosis.rows))
    return one.tick <= anomaly.tick <= one.until


def _is_left_by(one: Strike, anomaly: Anomaly, diagnosis: Diagnosis, before: Sequence[Incident]) -> bool:
    """Say whether it may be of damage that is still there: noticed late, or not over since it was."""
    if one.fault not in _LEAVE_DAMAGE or anomaly.tick < one.tick:
        return False
    if diagnosis.cause is Cause.PROCESS and anomaly.signal is not Signal.RANK_MISMATCH:  # it was on one rank alone
        return False
    seen = [past for past in before if past.anomaly.tick >= one.tick and one.fault in past.drill.split(", ")]
    if seen:
        return seen[-1].anomaly.reached_weights and seen[-1].outcome is not Outcome.RECOVERED
    return anomaly.tick <= one.until + _NOTICED_WITHIN
